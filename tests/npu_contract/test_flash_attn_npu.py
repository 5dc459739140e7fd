"""Our calls against the Python interfaces of flash_attn_npu from PyPI, installed without its NPU build."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollout.kernels.npu.fa3 import FlashAttention
from rollout.kernels.npu.lines import LATER, TRAIN_INFER, InstalledAttention, recognise
from tests.npu_contract.signatures import LATER_LINE, TRAIN_INFER_LINE


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """The package asks for the device's name and for its compiled part while it is imported."""
    import torch_npu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_npu.npu, "get_device_name", lambda *a: "Ascend910B4")
        for name in ("flash_attn_npu", "flash_attn_npu_3"):
            extension = f"{name}.{name}"
            patch.setitem(sys.modules, extension, types.ModuleType(extension))
        yield


def bare(function: Any) -> inspect.Signature:
    """A signature without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


@pytest.mark.parametrize("place", LATER_LINE)
def test_recorded_signatures_are_the_packages(place: str) -> None:
    module, _, name = place.partition(":")
    assert str(bare(getattr(importlib.import_module(module), name))) == LATER_LINE[place]


def test_the_package_is_recognised() -> None:
    installed = recognise()
    assert installed.line is LATER and installed.version == importlib.metadata.version("flash_attn_npu")


def bound(signature: inspect.Signature, calls: list[inspect.BoundArguments], result: Any) -> Any:
    def function(*args: Any, **options: Any) -> Any:
        calls.append(signature.bind(*args, **options))
        return result

    return function


def parsed(text: str) -> inspect.Signature:
    scope: dict[str, Any] = {}
    exec(f"def function{text}: ...", scope)
    return inspect.signature(scope["function"])


@pytest.mark.parametrize("line", [LATER, TRAIN_INFER], ids=lambda line: line.name)
def test_both_lines_accept_exactly_our_calls(line: Any) -> None:
    recorded = LATER_LINE if line is LATER else TRAIN_INFER_LINE
    calls: list[inspect.BoundArguments] = []
    x = torch.zeros(3, 2, 16, dtype=torch.bfloat16)
    kvcache, varlen = (bound(parsed(recorded[place]), calls, x) for place in (line.kvcache, line.varlen))
    flash = FlashAttention.of(InstalledAttention(line, "0", kvcache, varlen))
    pages, lengths, cu = x.new_zeros(2, 128, 1, 16), torch.tensor([3], dtype=torch.int32), torch.tensor([0, 3])
    flash.paged(
        x, pages, pages, page_table=lengths[None], cache_seqlens=lengths, cu_seqlens_q=cu, max_seqlen_q=3, scale=0.1,
        causal=True,
    )  # fmt: skip
    flash.packed(
        x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3, max_seqlen_k=3, scale=0.1, causal=True
    )  # fmt: skip
    paged, packed = (call.arguments for call in calls)
    assert paged["num_splits"] == 1 and paged["causal"] is True and paged["softmax_scale"] == 0.1
    assert not {"k", "v", "scheduler_metadata", "cache_batch_idx", "softcap", "window_size"} & set(paged)
    assert packed["deterministic"] is True and packed["max_seqlen_k"] == 3
    assert packed.get("num_splits", 1) == 1 and packed.get("dropout_p", 0.0) == 0.0


def test_another_lines_call_is_not_accepted() -> None:
    """Negative control: v3's training call has no dropout, v2's no num_splits."""
    v3, v2 = (parsed(LATER_LINE[f"{m}:flash_attn_varlen_func"]) for m in ("flash_attn_npu_3", "flash_attn_npu"))
    with pytest.raises(TypeError):
        v3.bind(*range(7), dropout_p=0.0)
    with pytest.raises(TypeError):
        v2.bind(*range(7), num_splits=1)
