"""Growth curves: how speed and memory go with sequences, context, shared prefixes and replicas."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.workloads import Workload, decode_workload


@dataclass(frozen=True, slots=True)
class Curve:
    """One thing that grows, everything else kept."""

    name: str
    title: str
    axis: str
    workloads: tuple[Workload, ...]
    """in rising order: the peak memory of a point includes what the earlier ones have touched"""
    values: tuple[float, ...]
    """of the axis, one a workload"""
    log: bool = True


def _sequences() -> Curve:
    counts = (1, 2, 4, 8, 16, 32, 64, 128)
    return Curve("sequences", "128 + 128 tokens", "sequences", tuple(map(decode_workload, counts)), counts)


def _context() -> Curve:
    lengths = (128, 256, 512, 1024, 2048, 4096)
    works = tuple(Workload(f"context{n}", prompts=4, prompt_tokens=n, new_tokens=64) for n in lengths)
    return Curve("context", "4 sequences, 64 new tokens", "prompt tokens", works, lengths)


def _share() -> Curve:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    works = tuple(
        Workload(f"share{round(100 * s)}", 32, prompt_tokens=512, new_tokens=64, shared_tokens=round(512 * s))
        for s in shares
    )
    return Curve("share", "32 sequences of 512 + 64 tokens", "shared part of the prompt", works, shares, log=False)


CURVES = {curve.name: curve for curve in (_sequences(), _context(), _share())}
CURVE_RUNNERS = ("floor", "vllm")
REPLICA_RUNNERS = {
    "service-1x1": "1 replica, 1 thread",
    "service": "1 replica, 2 threads",
    "service-2x1": "2 replicas, 1 thread each",
}
"""Runners of the replica comparison, on 32 sequences; "service" has as many threads as the bare engine."""
REPLICA_WORKLOAD = decode_workload(32)
