"""Invariant mode: each replaced operation is row-invariant inside, torch's own outside, and the switch is safe."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from rollout.kernels.cpu.invariant import invariant_mode, overrides
from tests.engines import torch_threads

DTYPES = (torch.float32, torch.bfloat16)
ROWS = [*range(1, 41), 63, 64, 65, 100, 128, 200]
MOST = 256


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).to(dtype)


Operation = Callable[[torch.Tensor], torch.Tensor]


def operations(width: int, dtype: torch.dtype) -> dict[str, Operation]:
    """Functions of [M, width] whose row i should depend on row i only."""
    weight, bias = random(48, width, seed=1, dtype=dtype), random(48, seed=2, dtype=dtype)
    batch = random(3, width, 20, seed=3, dtype=dtype)
    return {
        "mm": lambda x: functional.linear(x, weight),
        "addmm": lambda x: functional.linear(x, weight, bias),
        "linear 3d": lambda x: functional.linear(x[None], weight)[0],
        "bmm": lambda x: (x.expand(3, *x.shape) @ batch).transpose(0, 1),
        "silu": functional.silu,
        "sigmoid": torch.sigmoid,
        "gelu": functional.gelu,
        "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
        "sum": lambda x: x.sum(-1),
        "mean": lambda x: x.mean(-1, keepdim=True),
        "float32 mean": lambda x: x.float().pow(2).mean(-1),
    }


NAMES = tuple(operations(8, torch.float32))


def rows_that_differ(name: str, width: int, dtype: torch.dtype, rows: list[int]) -> list[int]:
    """Row counts at which some row differs from the same row among ``MOST``."""
    operation = operations(width, dtype)[name]
    x = random(MOST, width, dtype=dtype)
    whole = operation(x)
    return [m for m in rows if not torch.equal(operation(x[:m].clone()), whole[:m])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [64, 1000])
def test_rows_are_invariant(name: str, width: int, dtype: torch.dtype) -> None:
    with invariant_mode():
        for threads in (1, 2):
            with torch_threads(threads):
                assert rows_that_differ(name, width, dtype, ROWS) == []


def test_a_row_is_invariant_to_its_place() -> None:
    x, weight = random(40, 1000), random(48, 1000, seed=1)
    with invariant_mode():
        whole = functional.silu(functional.linear(x, weight))
        for i in range(40):
            assert torch.equal(functional.silu(functional.linear(x[i : i + 1], weight))[0], whole[i])


def test_one_long_row_reduces_as_among_others() -> None:
    x = random(3, 151_936)
    with torch_threads(2), invariant_mode():
        for reduce in (torch.sum, torch.mean):
            whole = reduce(x, -1)
            assert torch.equal(torch.stack([reduce(x[i : i + 1], -1)[0] for i in range(3)]), whole)
            assert torch.equal(reduce(x[0], 0), whole[0])


def test_outside_the_mode_rows_vary() -> None:
    """Negative control: torch's own kernels choose by shape, in fp32 already for a single row."""
    with torch_threads(2):
        names = ("mm", "addmm", "silu", "sigmoid", "gelu")
        varying = {n: rows_that_differ(n, 1000, torch.float32, [1, 2, 3]) for n in names}
    assert 1 in varying["mm"] + varying["addmm"], varying


SMOLLM2_SHAPES = [(576, 576), (576, 192), (576, 1536), (1536, 576)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), SMOLLM2_SHAPES)
def test_every_linear_of_smollm2(width: int, out: int, dtype: torch.dtype) -> None:
    x, weight = random(700, width, dtype=dtype), random(out, width, seed=1, dtype=dtype)
    with invariant_mode():
        whole = functional.linear(x[:MOST], weight)
        for m in range(1, 41):
            assert torch.equal(functional.linear(x[:m], weight), whole[:m]), m
        for m in (255, 257, 511, 512, 700):
            assert torch.equal(functional.linear(x[:m], weight)[:MOST], whole[:m]), m


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_of_smollm2(dtype: torch.dtype) -> None:
    x, weight = random(64, 576, dtype=dtype), random(49_152, 576, seed=1, dtype=dtype)
    with invariant_mode():
        whole = functional.linear(x, weight)
        for m in (1, 2, 3, 15, 16, 17, 31, 33):
            assert torch.equal(functional.linear(x[:m], weight), whole[:m]), m


# ---- what the operations return ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_values_stay_right(name: str, dtype: torch.dtype) -> None:
    x = random(7, 64, dtype=dtype)
    outside = operations(64, dtype)[name](x)
    with invariant_mode():
        inside = operations(64, dtype)[name](x)
    assert inside.dtype == outside.dtype and inside.shape == outside.shape
    compared = torch.float32 if name == "float32 mean" else dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[compared]
    assert torch.allclose(inside, outside, rtol=tolerance, atol=tolerance * 10)


def test_addmm_with_a_matrix_bias_and_factors() -> None:
    a, b, bias = random(5, 64), random(64, 9, seed=1), random(5, 9, seed=2)
    for addend in (bias, bias[:1], bias[0], bias[:, :1]):
        right = torch.addmm(addend.double(), a.double(), b.double(), beta=0.5, alpha=2)
        with invariant_mode():
            assert torch.allclose(torch.addmm(addend, a, b, beta=0.5, alpha=2).double(), right, atol=1e-4)
            alone = torch.addmm(addend[:1] if addend.dim() == 2 else addend, a[:1], b, beta=0.5, alpha=2)
            assert torch.equal(alone[0], torch.addmm(addend, a, b, beta=0.5, alpha=2)[0])


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [None, (), (0,), (-1,), (0, 1)])
def test_reductions_keep_torchs_meaning(dims: tuple[int, ...] | None, keepdim: bool) -> None:
    x = random(3, 20_000).double()
    right = (x.sum(dims, keepdim=keepdim), x.mean(dims, keepdim=keepdim))
    with invariant_mode():
        found = (x.sum(dims, keepdim=keepdim), x.mean(dims, keepdim=keepdim))
        assert torch.zeros(0, 5).sum(0).tolist() == [0.0] * 5
        assert x.float().sum(dtype=torch.float64).dtype == torch.float64
        assert int(torch.ones(40_000, dtype=torch.bool).sum()) == 40_000
    for a, b in zip(found, right, strict=True):
        assert a.shape == b.shape and torch.allclose(a, b)


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_reduction_of_a_scalar_along_a_dimension(reduce: Callable[..., torch.Tensor]) -> None:
    with invariant_mode():
        assert float(reduce(torch.tensor(3.0), -1)) == 3.0


def test_rsqrt_of_integers_is_floating() -> None:
    with invariant_mode():
        assert torch.rsqrt(torch.tensor([4, 16])).tolist() == [0.5, 0.25]


def test_gradients_flow_through_the_replaced_operations() -> None:
    def gradient() -> torch.Tensor:
        x = random(7, 64).requires_grad_()
        y = functional.silu(functional.linear(x, random(48, 64, seed=1))) * torch.sigmoid(x[:, :48])
        (y.mean(-1) + torch.rsqrt(x.pow(2).mean(-1) + 1)).sum().backward()
        assert x.grad is not None
        return x.grad

    outside = gradient()
    with invariant_mode():
        assert torch.allclose(gradient(), outside, atol=1e-5)


# ---- the switch -------------------------------------------------------------------------------------------------


def fingerprint() -> bytes:
    """Bits that the mode changes."""
    x = random(1, 1000)
    return (
        functional.silu(functional.linear(x, random(48, 1000, seed=1))).numpy().tobytes()
        + functional.silu(x).numpy().tobytes()
    )


def test_torch_is_restored_and_modes_nest() -> None:
    outside = fingerprint()
    assert not overrides().active
    with invariant_mode():
        inside = fingerprint()
        with invariant_mode():
            assert fingerprint() == inside
        assert overrides().active and fingerprint() == inside
    assert not overrides().active
    assert fingerprint() == outside != inside


def test_an_exception_leaves_the_mode() -> None:
    outside = fingerprint()
    with pytest.raises(ArithmeticError), invariant_mode(), invariant_mode():
        raise ArithmeticError
    assert not overrides().active and fingerprint() == outside


def test_threads_share_one_installation() -> None:
    """Whoever is inside stays inside until the last one leaves, whatever the others do."""
    outside, wrong = fingerprint(), []
    with invariant_mode():
        inside = fingerprint()
    start = threading.Barrier(4, timeout=60)

    def come_and_go() -> None:
        start.wait()
        for _ in range(25):
            with invariant_mode():
                if not overrides().active or fingerprint() != inside:
                    wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not overrides().active and fingerprint() == outside


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_near_float64_and_learns(approximate: str) -> None:
    """Over the whole range, large values too; the gradient is torch's own."""
    x = torch.cat((torch.linspace(-40, 40, 4001), torch.tensor([-1e30, 1e30, 0.0, -0.0]))).requires_grad_()
    wanted = functional.gelu(x.detach().double(), approximate=approximate)
    with invariant_mode():
        out = functional.gelu(x, approximate=approximate)
        out.sum().backward()
    assert (out.detach().double() - wanted)[:-4].abs().max() < 1e-5
    assert torch.allclose(out[-4:].detach(), torch.tensor([0.0, 1e30, 0.0, 0.0]), atol=1e-7)
    assert x.grad is not None and bool((x.grad[3000:4001] > 0.9).all()) and bool(x.grad[:4001].isfinite().all())
    with invariant_mode():
        low = functional.gelu(x.detach().bfloat16(), approximate=approximate)
    assert low.dtype == torch.bfloat16 and (low[:-4].double() - wanted[:-4]).abs().max() < 0.2
