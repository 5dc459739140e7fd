"""The Ascend batch_invariant_ops: found whole, told from its namesake, proven, installed; refused in every other
state."""

from __future__ import annotations

import importlib.metadata
import types
from typing import Any

import pytest
import torch

from rollout.errors import ConfigError
from rollout.kernels.npu.invariant import InvariantMode
from rollout.kernels.npu.package_ops import FUSED_INFER, REQUIRED, PackageOps, find_package, prove, replacements
from rollout.kernels.npu.runtime import choose_package
from tests.rollout.kernels.npu.emulator.package import emulated_ops


def found(ops: Any, *, module: Any = None, version: str = "2.0.0") -> PackageOps | None:
    return find_package(lambda _: module or types.ModuleType("m"), lambda _: version, lambda _: object(), lambda: ops)


def test_a_whole_package() -> None:
    package = found(emulated_ops())
    assert package is not None and package.version == "2.0.0" and package.fused_infer is None
    prove(package, torch.device("cpu"))
    whole = found(emulated_ops(**{FUSED_INFER: print}))
    assert whole is not None and whole.fused_infer is print


def test_nothing_installed() -> None:
    assert find_package(present=lambda _: None) is None


def test_the_cuda_package_of_the_same_name() -> None:
    module = types.ModuleType("batch_invariant_ops")
    module.set_batch_invariant_mode = print  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="CUDA package of thinking-machines"):
        found(emulated_ops(), module=module)


@pytest.mark.parametrize("name", REQUIRED)
def test_half_installed(name: str) -> None:
    ops = emulated_ops()
    delattr(ops, name)
    with pytest.raises(ConfigError, match=f"half installed: it lacks {name}.*LD_LIBRARY_PATH"):
        found(ops)


def test_versions() -> None:
    with pytest.raises(ConfigError, match=r"0\.9 is older"):
        found(emulated_ops(), version="0.9")

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    package = find_package(lambda _: types.ModuleType("m"), unknown, lambda _: object(), emulated_ops)
    assert package is not None and package.version == "unknown"


def test_a_package_that_does_not_import() -> None:
    def load(name: str) -> types.ModuleType:
        raise ImportError("libcust_opapi.so: cannot open shared object file")

    with pytest.raises(ConfigError, match=r"does not import \(libcust_opapi\.so"):
        find_package(load, present=lambda _: object())


def test_operators_that_fail_or_lie() -> None:
    def absent(*_: Any) -> torch.Tensor:
        raise RuntimeError("aclnnMmBatchInvariant not in libopapi.so\nmore")

    package = found(emulated_ops(npu_mm_batch_invariant=absent))
    assert package is not None
    with pytest.raises(ConfigError, match=r"npu_mm_batch_invariant does not run .aclnnMmBatchInvariant"):
        prove(package, torch.device("cpu"))
    lying = found(emulated_ops(npu_reduce_sum_batch_invariant=lambda x, dim, keepdim: x.mean(dim, keepdim)))
    assert lying is not None
    with pytest.raises(ConfigError, match=r"reduce_sum_batch_invariant 2.0.0 computes a wrong result"):
        prove(lying, torch.device("cpu"))


def test_products_and_reductions_go_to_the_package_with_gradients() -> None:
    asked: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            asked.append(name)
            return function(*args, **options)

        return call

    ops = types.SimpleNamespace(**{n: counted(n, f) for n, f in vars(emulated_ops()).items()})
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((4, 8), (6, 8), (6,)))
    with InvariantMode("CPU", replacements(PackageOps("2.0.0", ops)))():
        hidden = torch.nn.functional.linear(x, weight, bias)
        loss = torch.log_softmax(hidden, -1).sum() + hidden.softmax(-1).mean(-1).sum() + hidden.sum(-1).sum()
        loss = loss + torch.matmul(x[None], weight.T[None]).sum()
        loss.backward()
    assert set(asked) == set(REQUIRED)
    assert all(t.grad is not None and bool(t.grad.isfinite().all()) for t in (x, weight, bias))
    again = torch.nn.functional.linear(x, weight, bias)
    assert torch.allclose(hidden, again, atol=1e-5)


def test_the_choice() -> None:
    package = PackageOps("2.0.0", emulated_ops())
    assert choose_package("auto", package) is package and choose_package("auto", None) is None
    assert choose_package("fixed_shape", package) is None
    assert choose_package("batch_invariant_ops", package) is package
    with pytest.raises(ConfigError, match="not installed"):
        choose_package("batch_invariant_ops", None)
    with pytest.raises(ConfigError, match="none of auto"):
        choose_package("other", None)
