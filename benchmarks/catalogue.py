"""The runners that exist, by name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.runner import RunnerSpec
from rollout.openmp import spin_setting

BASELINE = "zerodrift"
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_OURS = Path(sys.executable)


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose about runners."""

    threads: int
    peers: Path
    """folder with the other engines' environments"""


def runner_specs(options: Options) -> dict[str, RunnerSpec]:
    """Every runner. One thread count for all."""
    threads = {"OMP_NUM_THREADS": str(options.threads)} | _QUIET
    native = threads | spin_setting()

    def ours(name: str, title: str, driver: str, **config: object) -> RunnerSpec:
        return RunnerSpec(name, title, f"benchmarks.drivers.{driver}", _OURS, config, native, (ROOT,))

    def peer(name: str, title: str, driver: str, *paths: Path, sleeps: bool = True) -> RunnerSpec:
        python = options.peers / name / "bin" / "python"
        return RunnerSpec(name, title, f"benchmarks.drivers.{driver}", python, {}, threads, (ROOT, *paths), sleeps)

    plain = "benchmarks.drivers.hf_generate"
    specs = (
        ours(BASELINE, "zerodrift", "zerodrift"),
        ours("inexact", "zerodrift, nothing exact forced", "zerodrift", exact=False),
        ours("digests", "zerodrift, row digests", "zerodrift", digests=True),
        ours("service", "zerodrift service (Ray, gRPC)", "service"),
        ours("service-1x1", "service, 1 replica of 1 thread", "service", threads_per_replica=1),
        ours("service-2x1", "service, 2 replicas of 1 thread", "service", replicas=2, threads_per_replica=1),
        ours("floor", "floor (GEMMs alone)", "floor"),
        RunnerSpec("hf", "Hugging Face generate", plain, _OURS, {}, threads, (ROOT,)),
        peer("vllm", "vLLM CPU (compiled)", "vllm_cpu"),
        # Its scheduler polls.
        peer("sglang", "SGLang CPU (torch_native)", "sglang_cpu", ROOT / "benchmarks/peers/stubs", sleeps=False),
    )
    return {spec.name: spec for spec in specs}


BLOCKS: tuple[tuple[str, ...], ...] = (("vllm",), ("floor", "inexact", "digests"), ("service",), ("hf",), ("sglang",))
"""Runners that are in memory at the same time, beside zerodrift; in order of interest."""
