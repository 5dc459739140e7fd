"""The sizes that zerodrift runs with, in the bare engine and in the service alike."""

from __future__ import annotations

from benchmarks.workloads import PAGE
from rollout.config import Settings
from rollout.scheduler import SchedulerLimits

MAX_RUNNING = 128
"""As many as the largest workload has sequences; the service's default is smaller."""


def scheduler_limits() -> SchedulerLimits:
    """The service's defaults, but for more sequences at a time."""
    engine = Settings().engine
    return SchedulerLimits(engine.max_batch_tokens, MAX_RUNNING, engine.max_waiting, engine.chunk_size, PAGE)
