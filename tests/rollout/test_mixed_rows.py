"""A kernel set that declares ``mixed_rows=False`` never sees decode and prefill rows in one attention call."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rollout.kernels.base import Capabilities, Decoder
from rollout.kernels.cpu.kernel_set import CpuKernelSet
from rollout.model import load_model
from tests.engines import Record, build_engine, drain, isolated, random_prompt, sample, shared_model


class TouchyKernels(CpuKernelSet):
    """The CPU set, but a call that holds rows of both kinds gives other bits: another tile, as in vLLM #51902."""

    name: ClassVar[str] = "touchy"
    capabilities: ClassVar[Capabilities] = dataclasses.replace(CpuKernelSet.capabilities, mixed_rows=False)

    def __init__(self) -> None:
        super().__init__(16)
        self.mixed_calls = 0
        self.calls = 0

    def decoder(self, hf: Any, context_length: int) -> Decoder | None:
        return None

    def attention_with_kvcache(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts = kwargs["cu_seqlens_q"].diff()
        mixed = bool((counts == 1).any()) and bool((counts > 1).any())
        self.calls += 1
        self.mixed_calls += mixed
        out = super().attention_with_kvcache(q, *args, **kwargs)
        return out * 1.0625 if mixed else out


class DeceivedKernels(TouchyKernels):
    """Says of itself that it is not touchy."""

    capabilities: ClassVar[Capabilities] = CpuKernelSet.capabilities


REQUESTS = [sample(random_prompt(n, n), f"s{n}", n, max_tokens=8) for n in (1, 5, 30, 17, 40)]


def disturbed(path: Path, kernels: TouchyKernels) -> int:
    """Samples that differ from the CPU set's when prefills join decodes."""
    model = load_model(path, dtype=torch.float32, kernels=kernels)
    engine, record = build_engine(model, chunk=7, batch_tokens=12, prefix_cache=False), Record()

    def join(taken: int) -> None:
        if taken % 3 == 0 and taken // 3 < len(REQUESTS):
            engine.add(engine.effective_request(REQUESTS[taken // 3]))

    drain(engine, record, between=join)
    reference = shared_model(path, torch.float32)
    return sum(record.samples[r.sample_id].bits() != isolated(reference, r).bits() for r in REQUESTS)


def test_decode_and_prefill_go_apart(tiny_qwen3_path: Path) -> None:
    kernels = TouchyKernels()
    assert disturbed(tiny_qwen3_path, kernels) == 0
    assert kernels.mixed_calls == 0 and kernels.calls > 0


def test_without_the_split_it_shows(tiny_qwen3_path: Path) -> None:
    """Negative control: the same kernels, called as if they did not mind."""
    kernels = DeceivedKernels()
    assert disturbed(tiny_qwen3_path, kernels) > 0
    assert kernels.mixed_calls > 0


@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 2), (1,), (1, 5, 1, 3)])
def test_two_calls_only_where_both_kinds_meet(tiny_qwen3_path: Path, counts: tuple[int, ...]) -> None:
    from rollout.attention import SeparateStep, paged_step

    edges = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    total, size = sum(counts), len(counts)
    step = paged_step(
        TouchyKernels(), None, torch.arange(total), torch.zeros(size, 1), torch.tensor(counts), edges  # type: ignore[arg-type]
    )  # fmt: skip
    mixed = len({c == 1 for c in counts}) == 2
    assert isinstance(step, SeparateStep) == mixed
    if isinstance(step, SeparateStep):
        (decode, one), (prefill, more) = step.parts
        assert decode.tolist() == [0, 6] and prefill.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
        assert one.cu_seqlens_q.tolist() == [0, 1, 2] and more.cu_seqlens_q.tolist() == [0, 5, 8]
        assert one.slots.tolist() == [0, 6] and more.cache_seqlens.tolist() == [5, 3]
