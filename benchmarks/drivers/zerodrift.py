"""The native engine by itself: exact, or with nothing exact forced, or with row digests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.drivers.channel import Job, Sample, serve
from benchmarks.limits import scheduler_limits
from rollout.engine import Engine
from rollout.kernels.cpu import dot, linear
from rollout.kernels.registry import resolve_kernels
from rollout.model import SharedModel, load_model
from rollout.types import SampleEvent, SampleRequest, SamplingParams


def fastest_product(outer: int, inner: int, bias: torch.Tensor | None, dtype: torch.dtype) -> linear.ProductPlan:
    """In the place of ``linear.plan_product``."""
    if dot.available() and dtype == torch.bfloat16 and inner % 2 == 0:
        return linear.ProductPlan(block=inner)
    return linear.ProductPlan(packed_rows=1)


@contextlib.contextmanager
def without_exactness() -> Iterator[None]:
    """Models built inside take the fastest product, whatever the bits: what an engine without the promise does.

    One chain over the whole inner dimension where the processor has the instruction, else oneDNN's packed weights at
    any number of rows; nothing probed, nothing padded.

    A name that is gone from the engine is an AttributeError, never a measurement of the exact engine.
    """
    with (
        patch.object(linear, "plan_product", fastest_product),
        patch.object(linear, "stacking_is_exact", lambda layers: True),
    ):
        yield


def build_engine(model: SharedModel, kv_tokens: int, *, exact: bool = True) -> Engine:
    """An engine as a replica of the service has it, but for its sizes."""
    with contextlib.nullcontext() if exact else without_exactness():
        return Engine(model, scheduler_limits(), kv_cache_tokens=kv_tokens)


class ZerodriftEngine:
    """One engine for all jobs, as in a service; jobs bring prompts that its prefix cache has not seen."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(config["threads"])
        self._kernels = resolve_kernels()
        self._exact: bool = config.get("exact", True)
        self._digests: bool = config.get("digests", False)
        model = load_model(Path(config["model"]), dtype=torch.bfloat16, kernels=self._kernels)
        self._engine = build_engine(model, config["kv_tokens"], exact=self._exact)
        self._jobs = 0

    def facts(self) -> dict[str, Any]:
        """Versions and sizes."""
        limits = self._engine.scheduler.limits
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "max_batch_tokens": limits.max_batch_tokens,
            "chunk_size": limits.chunk_size,
            "exact": self._exact,
            "row_digests": self._digests,
        }

    def run(self, job: Job) -> list[Sample]:
        """Queue everything, then step until all is done."""
        self._jobs += 1
        samples: dict[str, Sample] = {}
        for i, prompt in enumerate(job.prompts):
            sampling = SamplingParams(seed=job.seed * 100_000 + i, max_tokens=job.new_tokens, ignore_eos=True)
            for k in range(job.samples):
                name = f"{self._jobs}/{i}/{k}"
                request = SampleRequest(name, tuple(prompt), sampling, k, row_digests=self._digests)
                self._engine.add(self._engine.effective_request(request))
                samples[name] = ([], [])
        with self._kernels.invariant_mode() if self._exact else contextlib.nullcontext():
            while self._engine.live_ids:
                for event in self._engine.step():
                    if not isinstance(event, SampleEvent):
                        raise RuntimeError(f"the engine answered {event}")
                    if event.chunk is not None:
                        ids, logprobs = samples[event.sample_id]
                        ids.extend(event.chunk.token_ids.tolist())
                        logprobs.extend(event.chunk.policy_logprobs.tolist())
        return list(samples.values())


if __name__ == "__main__":
    serve(ZerodriftEngine)
