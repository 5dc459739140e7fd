"""Weights in panels, refilled in place, against a plain transposition."""

from __future__ import annotations

import pytest
import torch

from rollout.kernels.cpu import dot
from rollout.kernels.cpu.pack import PANEL


def layers(rows: tuple[int, ...], inner: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    bits = [torch.randint(-(2**15), 2**15, (n, inner), generator=generator, dtype=torch.int16) for n in rows]
    return [x.view(torch.bfloat16) for x in bits]


def plain(weights: list[torch.Tensor]) -> torch.Tensor:
    """int32 [panels, K / 2, 64] by torch alone."""
    whole = torch.cat(weights)
    panels = -(-whole.size(0) // PANEL)
    padded = torch.zeros(panels * PANEL, whole.size(1), dtype=torch.bfloat16)
    padded[: whole.size(0)] = whole
    return padded.view(torch.int32).view(panels, PANEL, -1).transpose(1, 2).contiguous()


@pytest.mark.skipif(not dot.available(), reason="no AVX512_BF16 here: there are no panels")
@pytest.mark.parametrize(
    ("rows", "inner"),
    [((576, 192, 192), 576), ((100,), 64), ((7, 130, 1), 34), ((64, 64), 2), ((1,), 30), ((49,), 96), ((16, 15), 62)],
)
def test_every_bit_lies_where_it_belongs_also_after_a_refill(rows: tuple[int, ...], inner: int) -> None:
    first, second = layers(rows, inner, 1), layers(rows, inner, 2)
    product = dot.DotProduct(first, None, 512)
    address = product._panels.data_ptr()
    assert torch.equal(product._panels, plain(first))
    assert not torch.equal(product._panels, plain(second)), "control"
    product.pack(second, None)
    assert torch.equal(product._panels, plain(second))
    assert product._panels.data_ptr() == address


@pytest.mark.skipif(not dot.available(), reason="no AVX512_BF16 here: there are no panels")
def test_a_weight_that_is_no_rows_side_by_side() -> None:
    (weight,) = layers((96,), 130, 3)
    turned = weight.t()
    assert not turned.is_contiguous()
    assert torch.equal(dot.DotProduct([turned], None, 512)._panels, plain([turned.contiguous()]))
