"""Results made of given figures, and a driver that needs no model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.results import Pair, Results
from benchmarks.runner import Measurement, RunnerSpec
from benchmarks.workloads import STANDARD, Workload

SESSION = {
    "date": "2026-01-02",
    "processor": "A processor",
    "isa": "AVX512",
    "cores": 2,
    "memory_gib": 24,
    "threads": 2,
    "load_at_start": 0.0,
    "python": "3.11.9",
    "packages": {},
    "commit": "abc1234",
}


def measurement(rate: float, work: Workload, *, others: float = 0.0, gib: float = 1.0) -> Measurement:
    """With ``rate`` tokens per second."""
    return Measurement(work.tokens / rate, work.tokens, 2.0, others, int(gib * 2**30), -5.0)


def pair(runner: str, workload: str, ours: list[float], theirs: list[float], **fields: Any) -> Pair:
    """Turns with these rates."""
    work = STANDARD[workload]
    turns = [(measurement(a, work), measurement(b, work, **fields)) for a, b in zip(ours, theirs, strict=True)]
    return Pair(runner, work, "s", turns)


def results(*pairs: Pair, model: str = "110m", kind: str = "engines") -> Results:
    """Of one session."""
    found = Results(model, kind, {"s": SESSION})
    for one in pairs:
        found.pairs[f"{one.runner}/{one.workload.name}"] = one
        found.runners.setdefault(one.runner, {"title": one.runner.title()})
    return found


def fake_spec(name: str = "fake", **config: Any) -> RunnerSpec:
    """``fake_driver``, told to behave as ``config`` says."""
    tests = Path(__file__).parent
    return RunnerSpec(name, name.title(), "fake_driver", Path(sys.executable), config, {}, (ROOT, tests))
