"""Inputs on which a different order of summation shows.

With random inputs a product summed in another order rounds to the same bfloat16 in all but about one output in ten
thousand, so a probe of a few rows passes by luck. Here almost all of every sum cancels: what is left is the rounding
error of the float32 sum itself, and an order shows in a good share of the outputs.
"""

from __future__ import annotations

import torch


def cancelling_product(
    rows: int, inner: int, outer: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, inner] and weight [outer, inner] whose products x W^T are about 1e-3 of the sum of their terms."""
    generator = torch.Generator().manual_seed(seed)
    half = inner // 2
    weight = torch.randn(outer, half, generator=generator)
    x = 8 * torch.randn(rows, half, generator=generator)
    weight, x = torch.cat((weight, weight), 1), torch.cat((x, -x), 1)
    if inner % 2:
        weight, x = torch.cat((weight, weight[:, :1]), 1), torch.cat((x, x[:, :1]), 1)
    x += 1e-2 * torch.randn(rows, inner, generator=generator)
    # Shuffled, so that the two halves of a pair meet in every way of splitting the sum.
    order = torch.randperm(inner, generator=generator)
    return x[:, order].to(dtype).contiguous(), (0.05 * weight[:, order]).to(dtype).contiguous()
