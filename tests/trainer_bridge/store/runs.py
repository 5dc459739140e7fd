"""Recorded runs for tests: small, with known faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.types import SamplingParams, VersionSpan
from tests.trainer_bridge.samples import f32, i32, sample
from trainer_bridge.compare import compare
from trainer_bridge.records import Comparison, ScoredSample
from trainer_bridge.store.facts import RunHead, SampleFacts, StepFacts
from trainer_bridge.store.recorder import Recorder, RecordOptions, RecordTotals

CAUSE = "weights v12: 1 of 272 tensors differ, first 'model.layers.3.mlp.down_proj.weight'"
TEXT = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "你好",
    "世界",
    "again",
    "until",
    "it",
    "sleeps",
]


def pieces(ids: Sequence[int]) -> list[str]:
    """A stand-in for a tokenizer: every id is a word."""
    return [f" {TEXT[i % len(TEXT)]}" for i in ids]


def batch(seed: int, *, samples: int = 6, broken: bool = False, version: int = 0, step: int = 0) -> list[ScoredSample]:
    """Samples of different lengths with a masked tool token each (NaN there); broken: about half differ."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(samples):
        length = int(rng.integers(5, 40))
        rollout = f32(-rng.exponential(1.0, length) - 1e-3)
        noise = f32(rng.normal(0, 0.05, length)) * f32(rng.random(length) < 0.5)
        trainer = rollout + noise if broken else rollout.copy()
        mask = np.ones(length, np.bool_)
        mask[2] = False
        rollout[2] = trainer[2] = np.nan
        made.append(
            sample(
                rollout, trainer, mask, request_id=f"step{step}/p{i // 2}", sample_index=i % 2,
                token_ids=i32(rng.integers(0, 100, length).tolist()), prompt_ids=i32(range(5)),
                spans=(VersionSpan(version, 0, length),), replica=f"replica-{i % 2}", seed=2**63 + i,
            )
        )  # fmt: skip
    return made


def record_run(
    root: Path,
    run: str = "run",
    *,
    steps: int = 3,
    broken_from: int | None = None,
    keep_rate: float = 1.0,
    writer: str = "rank0-test",
    **head: Any,
) -> tuple[list[Comparison], RecordTotals]:
    """Record a run; what ``compare`` said of each step, and the recorder's totals."""
    head = {"manifest": {"kernels.name": "cpu", "host.name": "a"}, "model": "tiny"} | head
    recorder = Recorder(
        root, RunHead(run, source="test", **head), options=RecordOptions(keep_rate=keep_rate, queued_steps=100),
        writer=writer, decode=pieces,
    )  # fmt: skip
    comparisons = []
    for step in range(steps):
        broken = broken_from is not None and step >= broken_from
        samples = batch(step, broken=broken, version=step, step=step)
        comparisons.append(compare(samples))
        facts = [SampleFacts(SamplingParams(seed=1, top_k=50 if i % 3 == 0 else 0), i / 7) for i in range(len(samples))]
        findings = (CAUSE,) if step == broken_from else ()
        known = StepFacts(
            step, step, "ab" * 32, tuple(i / 7 for i in range(len(samples))), {"rollout": 2.0}, {"loss": 0.5}, findings
        )
        assert recorder.record(known, samples, comparisons[-1], facts)
    return comparisons, recorder.close()
