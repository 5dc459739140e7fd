"""exp, silu and sigmoid: accuracy, one formula for every element, bfloat16 rounding over all inputs."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch

from rollout.kernels.cpu import activation
from rollout.kernels.cpu.numerics import exp_f32
from tests.engines import torch_threads
from tests.rollout.kernels.dense import exp_steps

FUNCTIONS = {"silu": activation.silu, "sigmoid": activation.sigmoid}
Function = Callable[[torch.Tensor], torch.Tensor]


@numba.njit
def exp_many(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = exp_f32(x[i])


@numba.njit
def exp_one(x: np.float32) -> np.float32:
    return exp_f32(x)


def test_exp_takes_plain_float32_steps() -> None:
    x = np.concatenate((np.linspace(-90, 88, 20_011), -np.logspace(-30, 1, 2000), [0.0, -0.0, -np.inf])).astype(
        np.float32
    )
    out = np.empty_like(x)
    exp_many(x, out)
    assert out.tobytes() == exp_steps(x).tobytes()
    assert [exp_one(v) for v in x[::501]] == out[::501].tolist()
    # Control: the library's exp is as right and not the same bits.
    assert out.tobytes() != np.exp(x).tobytes()


def test_exp_is_within_two_ulp() -> None:
    x = np.linspace(-87, 88, 200_003).astype(np.float32)
    out = np.empty_like(x)
    exp_many(x, out)
    right = np.exp(x.astype(np.float64)).astype(np.float32)
    assert np.abs(out.view(np.int32).astype(np.int64) - right.view(np.int32)).max() <= 2


def test_exp_at_the_ends() -> None:
    assert exp_one(np.float32(0)) == 1.0
    assert exp_one(np.float32(-np.inf)) == exp_one(np.float32(-87.01)) == 0.0
    assert exp_one(np.float32(-87)) > 0.0
    assert np.isnan(exp_one(np.float32(np.nan)))
    assert np.isfinite(exp_one(np.float32(88)))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_does_not_depend_on_its_place(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(70_001).astype(np.float32) * 6).to(dtype)
    with torch_threads(1):
        whole = function(x)
    for start in (1, 3, 7, 16384, 16385, 40_000):
        with torch_threads(2):
            assert torch.equal(function(x[start:]), whole[start:])
    for size in range(1, 40):
        assert torch.equal(function(x[:size]), whole[:size])
    assert torch.equal(function(x[:70_000].view(7, 100, 100)).view(-1), whole[:70_000])
    strided = x[:70_000].view(700, 100).t()
    assert torch.equal(function(strided), whole[:70_000].view(700, 100).t())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16_is_float32_rounded_once_for_every_input(name: str) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    ours, wide = FUNCTIONS[name](every), FUNCTIONS[name](every.float()).to(torch.bfloat16)
    finite = ~wide.isnan()
    assert torch.equal(ours.isnan(), wide.isnan())
    assert torch.equal(ours[finite].view(torch.int16), wide[finite].view(torch.int16))
    assert torch.equal(ours.isnan() | every.isnan(), ours.isnan()), "a NaN was laundered"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(name: str) -> None:
    """Within 4 ulp of float64 where exp does not saturate (|x| < 87)."""
    x = torch.linspace(-86.9, 86.9, 100_003)
    right = (torch.sigmoid(x.double()) * (x.double() if name == "silu" else 1)).numpy()
    out = FUNCTIONS[name](x).numpy().astype(np.float64)
    assert (np.abs(out - right) <= 4 * np.spacing(np.abs(right).astype(np.float32))).all()


def test_empty_and_scalar_inputs() -> None:
    for function in FUNCTIONS.values():
        assert function(torch.empty(0, 5)).shape == (0, 5)
        assert function(torch.tensor(0.0)).shape == ()
    assert float(activation.sigmoid(torch.tensor(0.0))) == 0.5
    assert float(activation.silu(torch.tensor(0.0))) == 0.0
