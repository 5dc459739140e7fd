"""Our calls of ``npu::`` operators against the real torch_npu 2.13.0: schemas, arguments, output shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from rollout.kernels.npu.fixed_shape import REPLACEMENTS
from rollout.kernels.npu.fused_infer import fused_infer
from rollout.kernels.npu.invariant import COMPOSITES, InvariantMode
from rollout.kernels.npu.norm import rms_norm
from tests.rollout.kernels.npu.emulator.device import OPERATORS, SCHEMAS


def schema_lines() -> list[str]:
    return SCHEMAS.read_text(encoding="utf-8").splitlines()


def test_versions() -> None:
    assert torch_npu.__version__.startswith("2.13.0")
    assert not torch.npu.is_available()


@pytest.mark.parametrize("line", schema_lines(), ids=lambda line: line.partition("(")[0])
def test_the_snapshot_is_the_installed_schema(line: str) -> None:
    name = line.partition("(")[0].removeprefix("npu::")
    assert str(getattr(torch.ops.npu, name).default._schema) == line


# ---- what our code calls, with numbers on the CPU and again on meta ---------------------------------------------


class Recorder(TorchDispatchMode):
    """Collects calls of the npu namespace with their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "npu":
            self.calls.append((func, args, kwargs or {}, result))
        return result


def fused_infer_shapes(query: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Enough of the operator to record a call: shapes without numbers."""
    return torch.empty_like(query), torch.empty(0)


@pytest.fixture(scope="module", autouse=True)
def cpu_operators() -> Iterator[None]:
    library = torch.library.Library("npu", "IMPL")
    for name, function in OPERATORS.items():
        library.impl(name, function, "CPU")
    library.impl("npu_fused_infer_attention_score", fused_infer_shapes, "CPU")
    yield
    library._destroy()


def call_norm(dtype: torch.dtype, tiled: bool) -> None:
    x = torch.randn(3, 40, 64, dtype=dtype, requires_grad=True)
    weight = torch.randn(64, dtype=dtype, requires_grad=True)
    rms_norm(x, weight, 1e-6, tiled=tiled).sum().backward()
    assert x.grad is not None and weight.grad is not None and weight.grad.dtype == dtype


def call_fused_infer(causal: bool) -> None:
    pages = torch.zeros(5, 128, 2, 64, dtype=torch.bfloat16)
    fused_infer(
        torch.ops.npu.npu_fused_infer_attention_score,
        torch.zeros(7, 4, 64, dtype=torch.bfloat16),
        pages,
        pages,
        page_table=torch.zeros(3, 2, dtype=torch.int32),
        q_ends=[1, 2, 7],
        k_lengths=[4, 130, 5],
        scale=0.125,
        causal=causal,
    )


CALLS: dict[str, Callable[[], None]] = {
    "norm bf16": lambda: call_norm(torch.bfloat16, False),
    "norm bf16 in tiles": lambda: call_norm(torch.bfloat16, True),
    "norm fp32": lambda: call_norm(torch.float32, False),
    "fused infer causal": lambda: call_fused_infer(True),
    "fused infer": lambda: call_fused_infer(False),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_replay_on_meta(name: str) -> None:
    """The real operator takes our arguments and gives the shapes and dtypes that our code goes on with."""
    with Recorder() as recorder:
        CALLS[name]()
    assert recorder.calls, "nothing was called"
    for func, args, kwargs, result in recorder.calls:
        on_meta = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, (args, kwargs))
        replayed = func(*on_meta[0], **on_meta[1])
        outputs = func._schema.returns
        for i, (mine, real) in enumerate(zip(result, replayed, strict=True)):
            if mine.numel() or "fused_infer" not in str(func):
                assert (mine.shape, mine.dtype) == (real.shape, real.dtype), f"{func} output {i} of {len(outputs)}"


@pytest.mark.parametrize("wrong", [{"unknown": 1}, {"num_heads": "four"}, {"input_layout": "WRONG"}])
def test_a_wrong_call_is_refused(wrong: dict[str, Any]) -> None:
    """Negative control: the replay can fail."""
    q = torch.zeros(7, 4, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        torch.ops.npu.npu_fused_infer_attention_score(q, q, q, **({"num_heads": 4, "input_layout": "TND"} | wrong))


def test_our_references_pass_opcheck() -> None:
    """The CPU implementations have the real operators' schema behaviour and meta shapes."""
    x, weight = torch.randn(6, 32), torch.randn(32)
    out, rstd = torch.ops.npu.npu_rms_norm(x, weight, 1e-6)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.npu.npu_rms_norm.default, (x, weight, 1e-6), test_utils=tests)
    torch.library.opcheck(torch.ops.npu.npu_rms_norm_backward.default, (out, x, weight, rstd), test_utils=tests)
    torch.library.opcheck(torch.ops.npu.npu_add_rms_norm.default, (x, x, weight, 1e-6), test_utils=tests)


# ---- the dispatcher of the device -------------------------------------------------------------------------------


def has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_every_replaced_operator_has_a_device_kernel(name: str) -> None:
    assert has(name, "PrivateUse1")
    assert torch.library.get_kernel(f"aten::{name}", "PrivateUse1") is not None


def test_operators_that_do_not_decompose_on_the_device_are_replaced() -> None:
    """torch_npu gives these an autograd kernel of their own: replacing mm alone would not reach them."""
    suspects = ("matmul", "softmax.int", "linear", "log_softmax.int", "einsum", "rms_norm", "layer_norm")
    assert {name for name in suspects if has(name, "AutogradPrivateUse1")} == set(COMPOSITES)


def test_the_mode_installs_on_the_device_key_and_leaves() -> None:
    before = {name: str(torch.library.get_kernel(f"aten::{name}", "PrivateUse1")) for name in REPLACEMENTS}
    mode = InvariantMode("PrivateUse1", REPLACEMENTS)
    with mode(), mode():
        inside = {name: str(torch.library.get_kernel(f"aten::{name}", "PrivateUse1")) for name in REPLACEMENTS}
        assert all(inside[name] != before[name] for name in REPLACEMENTS)
        # CPU tensors are none of this mode's business.
        assert torch.equal(torch.eye(3) @ torch.eye(3), torch.eye(3))
    after = {name: str(torch.library.get_kernel(f"aten::{name}", "PrivateUse1")) for name in REPLACEMENTS}
    assert after == before


def test_what_the_runtime_sets_exists() -> None:
    npu = torch_npu.npu
    for place in ("set_deterministic_level", "is_available", "is_initialized", "current_device", "get_device_name"):
        assert callable(getattr(npu, place)), place
    assert callable(npu.utils.get_cann_version)
    assert "allow_internal_format" in dir(npu.config) or hasattr(type(npu.config), "__setattr__")


def test_loading_the_runtime_without_a_device_is_refused_by_name() -> None:
    from rollout.errors import UnsupportedFeature
    from rollout.kernels.npu.runtime import load_runtime

    with pytest.raises(UnsupportedFeature, match="finds no NPU"):
        load_runtime()


def test_the_vision_towers_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``rollout/vision.py`` writes it; that module needs transformers, which is not installed here."""
    from torch_npu.op_plugin.meta import _meta_registrations

    # Its meta kernel asks for the device's name only to print a warning.
    monkeypatch.setattr(_meta_registrations, "_npu_fusion_attention_warning_printed", True)
    q = torch.zeros(6, 4, 16, dtype=torch.bfloat16, device="meta")
    out = torch.ops.npu.npu_fusion_attention(
        q, q, q, q.size(1), "TND", scale=0.25, actual_seq_qlen=[6], actual_seq_kvlen=[6]
    )
    assert out[0].shape == q.shape and out[0].dtype == q.dtype
