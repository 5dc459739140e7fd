"""Packed and stacked products against the invariant product, on inputs that show an order of summation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.kernels.cpu import dot
from rollout.kernels.cpu import linear as module
from rollout.kernels.cpu.invariant import invariant_mode
from rollout.kernels.cpu.linear import LinearPlan, ProductPlan, RolloutLinear, plan_product, stacking_is_exact
from rollout.kernels.probe import cancelling_product

SMOLLM = [(960, 576), (576, 576), (3072, 576), (576, 1536)]


def _layer(outer: int, inner: int, dtype: torch.dtype, bias: bool = False) -> torch.nn.Linear:
    layer = torch.nn.Linear(inner, outer, bias=bias, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(cancelling_product(1, inner, outer, dtype, seed=7)[1])
    return layer


def _halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    low, high = (x[:, part].float() @ weight[:, part].T.float() for part in (slice(0, 512), slice(512, None)))
    return (low + high).bfloat16()


def test_the_probe_shows_an_order_of_summation() -> None:
    """The negative control of every test here: two halves summed apart differ in a good share of the outputs."""
    x, weight = cancelling_product(64, 1024, 256, torch.bfloat16)
    with invariant_mode():
        whole = x @ weight.T
        halves = (
            x[:, :512].float() @ weight[:, :512].T.float() + x[:, 512:].float() @ weight[:, 512:].T.float()
        ).bfloat16()
    assert (whole != halves).float().mean() > 0.01


def test_random_inputs_would_hardly_show_it() -> None:
    """Why the probe cancels: with plain random inputs the same difference all but disappears."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 1024, generator=generator), torch.randn(256, 1024, generator=generator)
    x, weight = x.bfloat16(), weight.bfloat16()
    whole = (x.double() @ weight.T.double()).bfloat16()
    halves = (
        x[:, :512].float() @ weight[:, :512].T.float() + x[:, 512:].float() @ weight[:, 512:].T.float()
    ).bfloat16()
    assert (whole != halves).float().mean() < 0.01


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outer", "inner"), SMOLLM)
def test_rollout_linear_equals_the_invariant_product(outer: int, inner: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layer = _layer(outer, inner, torch.bfloat16)
        (rollout,) = LinearPlan().build([layer])
        x, _ = cancelling_product(256, inner, outer, torch.bfloat16, seed=3)
        with invariant_mode():
            wanted = layer(x)
            for rows in [*range(1, 40), 64, 100, 255, 256]:
                assert torch.equal(rollout(x[:rows]), wanted[:rows]), rows
    finally:
        torch.set_num_threads(before)


def test_float32_is_padded_not_packed() -> None:
    layer = _layer(96, 64, torch.float32)
    (rollout,) = LinearPlan().build([layer])
    x, _ = cancelling_product(32, 64, 96, torch.float32)
    assert plan_product(96, 64, None, torch.float32) == ProductPlan()
    with invariant_mode():
        for rows in (1, 2, 3, 5, 17, 32):
            assert torch.equal(rollout(x[:rows]), layer(x)[:rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_stacked_layers_keep_each_layers_bits(dtype: torch.dtype, bias: bool) -> None:
    layers = [_layer(n, 64, dtype, bias) for n in (64, 32, 32)]
    linears = LinearPlan().build(layers)
    x, _ = cancelling_product(33, 64, 64, dtype)
    with invariant_mode():
        for rows in (1, 2, 16, 33):
            got = torch.cat([linear(x[:rows]) for linear in linears], 1)
            assert torch.equal(got, torch.cat([layer(x) for layer in layers], 1)[:rows])
    assert stacking_is_exact(layers) == (len(linears) == 1)


def _right_from(rows: int, real: Any) -> Any:
    """A product that is wrong at fewer rows."""

    def product(*args: Any) -> torch.Tensor:
        out: torch.Tensor = real(*args)
        return out if out.size(0) >= rows else out + 1

    return product


def test_a_product_that_changes_bits_at_few_rows_is_not_used_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.dot, "available", lambda: False)
    monkeypatch.setattr(module, "_product", _right_from(8, module._product))
    assert plan_product(64, 64, None, torch.bfloat16) == ProductPlan(packed_rows=8)
    layer = _layer(64, 64, torch.bfloat16)
    (rollout,) = LinearPlan().build([layer])
    x, _ = cancelling_product(16, 64, 64, torch.bfloat16)
    with invariant_mode():
        assert torch.equal(rollout(x[:3]), layer(x)[:3])


@pytest.mark.skipif(not dot.available(), reason="no AVX512_BF16 here: the product is never tried")
def test_a_dot_product_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_product(64, 1024, None, torch.bfloat16) == ProductPlan(block=512)
    assert plan_product(64, 1536, None, torch.bfloat16) == ProductPlan(block=1024)
    monkeypatch.setattr(dot.DotProduct, "__call__", _right_from(2, dot.DotProduct.__call__))
    assert plan_product(64, 1024, None, torch.bfloat16).block is None
    # Chains of another length are as right, and not the same bits.
    x, weight = cancelling_product(8, 1024, 64, torch.bfloat16)
    monkeypatch.undo()
    assert not torch.equal(dot.DotProduct([weight], None, 512)(x), dot.DotProduct([weight], None, 1024)(x))


@pytest.mark.parametrize("way", [ProductPlan(block=512), ProductPlan(packed_rows=2), ProductPlan()])
def test_every_way_gives_the_same_bits(way: ProductPlan) -> None:
    if way.block is not None and not dot.available():
        pytest.skip("no AVX512_BF16 here")
    layer = _layer(100, 576, torch.bfloat16, bias=True)
    x, _ = cancelling_product(40, 576, 100, torch.bfloat16, seed=3)
    with invariant_mode():
        for rows in (1, 2, 6, 7, 13, 40):
            assert torch.equal(RolloutLinear([layer], way)(x[:rows]), layer(x)[:rows]), (way, rows)


def test_refresh_takes_weights_changed_in_place() -> None:
    layer = _layer(64, 64, torch.bfloat16)
    (rollout,) = LinearPlan().build([layer])
    x, _ = cancelling_product(4, 64, 64, torch.bfloat16)
    layer.weight.mul_(2)
    with invariant_mode():
        stale = rollout(x)
        rollout.refresh()
        assert not torch.equal(stale, layer(x))
        assert torch.equal(rollout(x), layer(x))
