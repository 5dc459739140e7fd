"""Record a demo run for the dashboard: the aligned trainer, and the ordinary trainer over the same tokens beside it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rollout.detokenize import Detokenizer
from trainer_bridge.demo.records import StepRecord
from trainer_bridge.demo.sabotage import Sabotage
from trainer_bridge.records import ScoredSample
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.store.facts import RunHead, SampleFacts, StepFacts
from trainer_bridge.store.pieces import pieces_with
from trainer_bridge.store.recorder import Recorder, RecordOptions

log = logging.getLogger(__name__)


class Recording:
    """Two recorders, fed in step."""

    def __init__(self, aligned: Recorder, ordinary: Recorder) -> None:
        self._aligned, self._ordinary = aligned, ordinary

    def step(
        self,
        result: StepRecord,
        records: Sequence[RolloutRecord],
        aligned: Sequence[ScoredSample],
        ordinary: Sequence[ScoredSample],
        rewards: Sequence[float],
        findings: Sequence[str],
    ) -> None:
        """Hand a step to both; ``findings`` are causes found in this step, on the aligned side."""
        facts = [
            SampleFacts(record.sampling, reward, record.manifest_digest)
            for record, reward in zip(records, rewards, strict=True)
        ]
        seconds = {"rollout": result.rollout_s, "train": result.train_s, "update": result.update_s}
        for recorder, samples, comparison, found in (
            (self._aligned, aligned, result.aligned, tuple(findings)),
            (self._ordinary, ordinary, result.ordinary, ()),
        ):
            step = StepFacts(
                step=result.step,
                weight_version=result.weight_version,
                weight_digest=result.weight_digest,
                rewards=tuple(rewards),
                seconds=seconds,
                findings=found,
            )
            recorder.record(step, samples, comparison, facts)


def run_heads(
    run: str | None,
    model: str,
    sabotage: Sabotage | None,
    manifest: Mapping[str, str],
    trainer_manifest: Mapping[str, str],
) -> tuple[RunHead, RunHead]:
    """Heads of the aligned run and of the ordinary one; ``run`` None: named by the time."""
    name = run or time.strftime("demo-%Y%m%d-%H%M%S")
    aligned = RunHead(
        name,
        source="demo",
        model=model,
        note=f"sabotage: {sabotage.value}" if sabotage else "aligned trainer",
        sibling=f"{name}-ordinary",
        manifest=dict(manifest),
        trainer_manifest=dict(trainer_manifest),
    )
    ordinary = RunHead(
        f"{name}-ordinary",
        source="demo",
        model=model,
        note="ordinary trainer: SDPA, padded, no invariant mode",
        sibling=name,
        manifest=dict(manifest),
        created=aligned.created - 1e-3,  # listed below the run it belongs to
    )
    return aligned, ordinary


@contextlib.contextmanager
def recording(runs: Path, heads: tuple[RunHead, RunHead], tokenizer: Detokenizer | None) -> Iterator[Recording]:
    """A recording into ``runs``. Waits at the end until everything is written, and says what was not."""
    decode = pieces_with(tokenizer) if tokenizer is not None else None
    options = RecordOptions(keep_rate=1.0)
    aligned, ordinary = (Recorder(runs, head, options=options, decode=decode) for head in heads)
    try:
        yield Recording(aligned, ordinary)
    finally:
        for recorder, head in ((aligned, heads[0]), (ordinary, heads[1])):
            totals = recorder.close()
            if totals.dropped:
                log.warning("run %s: %d steps were not recorded (%s)", head.run, totals.dropped, totals.last_error)
