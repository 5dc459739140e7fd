"""Where samples to explain come from: a JSONL file, or a step of a recorded run in the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollout.errors import InvalidRequest, NotFound
from rollout.types import FinishReason, Float32Array, LogprobMode, SamplingParams, VersionSpan
from trainer_bridge.rollout_files import read_records
from trainer_bridge.rollout_record import RolloutRecord

if TYPE_CHECKING:
    from trainer_bridge.store.reader import RunStore

Side = Literal["rollout", "trainer"]
_PREFIX = "run="


@dataclass(frozen=True, slots=True)
class Stored:
    """One sample as it was recorded."""

    record: RolloutRecord
    trainer_logprobs: Float32Array | None = None
    """[L] what the trainer computed; None: the source has only the rollout's"""
    weights_digest: str | None = None
    """root digest of the weights that sampled it; None: not recorded"""
    where: str = ""
    """step of the run; empty for a file"""


def read_samples(source: Path, step: int | None = None) -> list[Stored]:
    """Samples of a file of rollouts, or of a run's folder ``RUNS/run=NAME``: of one step, or of all, in order.

    Raises:
        InvalidRequest: a folder that is no run, or a step asked of a file. NotFound: no such step, or nothing kept.
    """
    if not source.is_dir():
        if step is not None:
            raise InvalidRequest(f"--step {step}: {source} is a file; steps belong to a run's folder", field="step")
        return [Stored(record) for record in read_records(source)]
    if not source.name.startswith(_PREFIX):
        raise InvalidRequest(f"{source} is not a run's folder; give RUNS/run=NAME or a JSONL file", field="rollouts")
    # The store needs pyarrow, which a file does not.
    from trainer_bridge.store.reader import RunStore

    store, run = RunStore(source.parent), source.name.removeprefix(_PREFIX)
    store.refresh()
    figures = store.figures(run)
    if step is not None and step not in figures:
        raise NotFound(f"run {run!r} has no step {step}; it has {', '.join(map(str, figures)) or 'none'}", field="step")
    found: list[Stored] = []
    for number in figures if step is None else (step,):
        digest = figures[number].get("weight_digest") or None
        found += _of_step(store, run, number, digest)
    if not found:
        raise NotFound(
            f"run {run!r} keeps no samples{'' if step is None else f' of step {step}'}: equal ones are kept at "
            "RecordOptions.keep_rate only",
            field="rollouts",
        )
    return found


def _of_step(store: RunStore, run: str, step: int, digest: str | None) -> Iterator[Stored]:
    # The store lists the most unequal first; of equal ones the order is that of their names.
    for row in store.samples(run, step):
        whole = store.sample(run, step, row["request_id"], row["sample_index"])
        trained = whole["token_columns"].column("trainer_bits").to_numpy().astype(np.int32).view(np.float32)
        yield Stored(record_of(whole), trained, digest, f"step {step}")


def record_of(row: dict[str, Any], side: Side = "rollout") -> RolloutRecord:
    """The record of a stored sample with its tokens (``RunStore.sample``), with the bits of one side."""
    columns = row["token_columns"]
    digests = columns.column(f"{side}_digest")
    sampling = None if row["sampling"] is None else _sampling(row["sampling"])
    spans = tuple(VersionSpan(s["version"], s["start"], s["end"]) for s in row["spans"])
    return RolloutRecord(
        request_id=row["request_id"],
        sample_index=row["sample_index"],
        prompt_ids=np.array(row["prompt_ids"], np.int32),
        token_ids=columns.column("token_id").to_numpy().astype(np.int32),
        policy_logprobs=columns.column(f"{side}_bits").to_numpy().astype(np.int32).view(np.float32),
        mask=columns.column("mask").to_numpy().astype(np.bool_),
        finish=FinishReason(row["finish"]) if row["finish"] else None,
        seed=None if row["seed"] is None else int(row["seed"]),
        sampling=sampling,
        mode=LogprobMode[row["mode"]],
        spans=spans,
        row_digests=None if digests.null_count else digests.to_numpy().astype(np.uint64),
        replica=row["replica"],
        weight_version=spans[-1].version if spans else None,
        manifest_digest=row["manifest_digest"],
        temperature=None if sampling is not None else row["temperature"],
    )


def _sampling(text: str) -> SamplingParams:
    values: dict[str, Any] = json.loads(text)
    exact: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return SamplingParams(**exact)
