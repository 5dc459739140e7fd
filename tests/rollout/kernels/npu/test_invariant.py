"""Invariant mode of the NPU set: decompositions, tiles, gradients, and leaving no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rollout.kernels.npu.fixed_shape import REPLACEMENTS, ROW_TILE, in_tiles
from rollout.kernels.npu.invariant import InvariantMode, matmul
from tests.rollout.kernels.npu.emulator.device import StockDevice

SHAPES = [((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)),
          ((1, 2, 3), (5, 3, 4)), ((7, 1, 2, 3), (5, 3, 4)), ((5, 2, 3), (3,))]  # fmt: skip


@pytest.fixture
def stock() -> Iterator[StockDevice]:
    device = StockDevice()
    with device():
        yield device


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_matmul_decomposes_as_torch_does(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = torch.randn(left, dtype=torch.float64), torch.randn(right, dtype=torch.float64)
    assert torch.allclose(matmul(a, b), torch.matmul(a, b))


def test_the_stock_device_is_not_invariant_and_the_mode_makes_it_so(stock: StockDevice) -> None:
    a, b = torch.randn(200, 96), torch.randn(96, 64)
    whole = torch.mm(a, b)
    assert not torch.equal(torch.mm(a[:1], b), whole[:1])
    with InvariantMode("CPU", REPLACEMENTS)():
        before = stock.products
        inside = torch.mm(a, b)
        assert stock.products - before == -(-200 // ROW_TILE)
        assert all(torch.equal(torch.mm(a[i : i + n], b), inside[i : i + n]) for i, n in ((0, 1), (5, 30), (199, 1)))


def test_the_devices_own_matmul_is_never_reached(stock: StockDevice) -> None:
    """On an NPU matmul has a kernel and a backward of its own, which no override of mm touches."""
    a, b = torch.randn(2, 5, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    with pytest.raises(AssertionError, match="own matmul"):
        torch.matmul(a, b)
    with InvariantMode("CPU", REPLACEMENTS)():
        torch.matmul(a, b).sum().backward()
        torch.nn.functional.linear(a, b.T).sum().backward()
    assert a.grad is not None and b.grad is not None


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear with bias": lambda x: torch.nn.functional.linear(x, torch.ones(6, 8), torch.arange(6.0)),
    "bmm": lambda x: torch.bmm(x[None].expand(3, -1, -1), torch.ones(3, 8, 5)),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "softmax": lambda x: torch.softmax(x, -1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(1),
    "sum of all": lambda x: x.sum(),
    "first dimension": lambda x: torch.log_softmax(x, 0).mean(0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 130])
def test_values_and_gradients_are_torchs(form: str, rows: int) -> None:
    x = torch.randn(rows, 8, dtype=torch.float64)
    plain, inside = x.clone().requires_grad_(), x.clone().requires_grad_()
    if form in ("linear with bias", "bmm"):
        plain, inside = x.float().requires_grad_(), x.float().requires_grad_()
    wanted = FORMS[form](plain)
    wanted.square().sum().backward()
    with InvariantMode("CPU", REPLACEMENTS)():
        got = FORMS[form](inside)
        got.square().sum().backward()
    assert got.shape == wanted.shape and torch.allclose(got, wanted, atol=1e-5)
    assert plain.grad is not None and inside.grad is not None and torch.allclose(plain.grad, inside.grad, atol=1e-4)


def test_no_rows() -> None:
    with InvariantMode("CPU", REPLACEMENTS)():
        assert torch.mm(torch.zeros(0, 4), torch.zeros(4, 3)).shape == (0, 3)
    assert in_tiles(torch.zeros(0, 4), 8, lambda x: x.sum(1)).shape == (0,)


def test_leaving_restores_torchs_kernels() -> None:
    a, b = torch.randn(70, 33), torch.randn(33, 9)
    before, mode = torch.mm(a, b), InvariantMode("CPU", REPLACEMENTS)
    with mode():
        assert mode.active
        with mode():
            torch.mm(a, b)
        assert mode.active
    assert not mode.active and torch.equal(torch.mm(a, b), before)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), mode():
        torch.mm(a, a)
    assert not mode.active
