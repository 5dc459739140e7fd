"""Inputs on which a different order of summation shows.

With random inputs a product summed in another order rounds to the same bfloat16 in all but about one output in ten
thousand, so a probe of a few rows passes by luck. Here almost all of every sum cancels: what is left is the rounding
error of the float32 sum itself, and an order shows in a good share of the outputs.
"""

from __future__ import annotations

import torch

_PART_ROWS = 4096


def cancelling_product(
    rows: int, inner: int, outer: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, inner] and weight [outer, inner] whose products x W^T are about 1e-3 of the sum of their terms."""
    generator = torch.Generator().manual_seed(seed)
    half = inner // 2
    x = _mirrored(8 * torch.randn(rows, half, generator=generator), inner, -1)
    x += 1e-2 * torch.randn(rows, inner, generator=generator)
    # Shuffled, so that the two halves of a pair meet in every way of splitting the sum.
    order = torch.randperm(inner, generator=generator)
    weight = torch.empty(outer, inner, dtype=dtype)
    # In parts: a large vocabulary's head would take several times its own memory in float32.
    for part in weight.split(_PART_ROWS):
        drawn = _mirrored(torch.randn(part.size(0), half, generator=generator), inner, 1)
        part.copy_(0.05 * drawn[:, order])
    return x[:, order].to(dtype).contiguous(), weight


def _mirrored(half: torch.Tensor, inner: int, sign: int) -> torch.Tensor:
    """Columns, the same once more times ``sign``, and where ``inner`` is odd the first once again."""
    return torch.cat((half, sign * half, half[:, : inner % 2]), 1)
