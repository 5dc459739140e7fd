"""A recorded sample as a line of the rollout JSONL format, for the other commands."""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np

from rollout.types import FinishReason, LogprobMode, SamplingParams, VersionSpan
from trainer_bridge.jsonl import encode
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.store.reader import RunStore

Side = Literal["rollout", "trainer"]


def sample_line(
    store: RunStore, run: str, step: int, request_id: str, sample_index: int, side: Side = "rollout"
) -> str:
    """One JSONL line with the bits of one side. Errors: NotFound."""
    row = store.sample(run, step, request_id, sample_index)
    columns = row["token_columns"]
    bits = columns.column(f"{side}_bits").to_numpy().astype(np.int32)
    digests = columns.column(f"{side}_digest")
    sampling = None if row["sampling"] is None else _sampling(row["sampling"])
    spans = tuple(VersionSpan(s["version"], s["start"], s["end"]) for s in row["spans"])
    record = RolloutRecord(
        request_id=request_id,
        sample_index=sample_index,
        prompt_ids=np.array(row["prompt_ids"], np.int32),
        token_ids=columns.column("token_id").to_numpy().astype(np.int32),
        policy_logprobs=bits.view(np.float32),
        mask=columns.column("mask").to_numpy().astype(np.bool_),
        finish=FinishReason(row["finish"]) if row["finish"] else FinishReason.ABORTED,
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
    return encode(record)


def _sampling(text: str) -> SamplingParams:
    values: dict[str, Any] = json.loads(text)
    exact: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return SamplingParams(**exact)
