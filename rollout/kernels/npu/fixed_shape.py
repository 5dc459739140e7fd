"""Row-invariant operations by construction, on the stock operators of the device.

A product or reduction runs on one fixed number of rows at a time, the last tile filled with zeros. The operator then
sees one shape whatever the batch, so it has no choice of kernel, split or order to make: a row's bits can depend on its
place within the tile at most, which the certificate measures. It costs launches for long prefills and wasted rows for
decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollout.kernels.overrides import Kernel

ROW_TILE = 128
"""Rows a product or norm sees; the cube unit's own row tile."""
REDUCE_TILE = 16
"""Rows a reduction over a vocabulary sees."""

LastReduction = Callable[[Any, Any, torch.Tensor, bool, torch.dtype | None], torch.Tensor]
"""(original kernel, dispatch keys, x, keepdim, dtype) -> x reduced over its last dimension"""


def in_tiles(x: torch.Tensor, tile: int, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """run on [tile, N] pieces of x [n, N], rows joined again; n = 0 runs once on zeros for the shape of the result."""
    parts: list[torch.Tensor] = []
    for start in range(0, max(x.size(0), 1), tile):
        part = x[start : start + tile]
        real = part.size(0)
        if real < tile:
            part = torch.cat((part, part.new_zeros(tile - real, *x.shape[1:])))
        parts.append(run(part.contiguous())[:real])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def mm(original: Any) -> Kernel:
    """aten::mm."""

    def replaced(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return in_tiles(a, ROW_TILE, lambda part: original.call_boxed(keys, part, b))

    return replaced


def addmm(original: Any) -> Kernel:
    """aten::addmm; a bias per row is tiled with the rows."""

    def replaced(
        keys: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        if bias.dim() == 2 and bias.size(0) > 1:
            width = a.size(1)
            both = torch.cat((a, bias.to(a.dtype)), 1)
            return in_tiles(
                both,
                ROW_TILE,
                lambda part: original.call_boxed(
                    keys, part[:, width:].contiguous(), part[:, :width].contiguous(), b, beta=beta, alpha=alpha
                ),
            )
        return in_tiles(a, ROW_TILE, lambda part: original.call_boxed(keys, bias, part, b, beta=beta, alpha=alpha))

    return replaced


def bmm(original: Any) -> Kernel:
    """aten::bmm, one member of the batch at a time."""

    def replaced(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return in_tiles(one, ROW_TILE, lambda part: original.call_boxed(keys, part[None], other[None])[0])

        products = [product(one, other) for one, other in zip(a, b, strict=True)]
        return torch.stack(products) if products else a.new_empty(0, a.size(1), b.size(2))

    return replaced


def last_reduction(reduce: LastReduction) -> Callable[[Any], Kernel]:
    """aten::mean.dim or aten::sum.dim_IntList by ``reduce``; other dimensions and dtypes are left to the device."""

    def build(original: Any) -> Kernel:
        def replaced(
            keys: Any,
            x: torch.Tensor,
            dim: Sequence[int] | None,
            keepdim: bool = False,
            *,
            dtype: torch.dtype | None = None,
        ) -> torch.Tensor:
            if x.is_floating_point() and over_last(x, dim):
                return reduce(original, keys, x, keepdim, dtype)
            whole: torch.Tensor = original.call_boxed(keys, x, dim, keepdim, dtype=dtype)
            return whole

        return replaced

    return build


def _reduced_in_tiles(
    original: Any, keys: Any, x: torch.Tensor, keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    rows = x.reshape(-1, x.size(-1))
    out = in_tiles(rows, ROW_TILE, lambda part: original.call_boxed(keys, part, [1], False, dtype=dtype))
    return out.reshape(*x.shape[:-1], 1) if keepdim else out.reshape(x.shape[:-1])


reduction = last_reduction(_reduced_in_tiles)


def over_last(x: torch.Tensor, dim: Sequence[int] | None) -> bool:
    """Whether ``dim`` is the last dimension of x, alone."""
    return x.dim() > 0 and dim is not None and len(dim) == 1 and dim[0] in (-1, x.dim() - 1)


def normalisation(original: Any) -> Kernel:
    """aten::_softmax and aten::_log_softmax over the last dimension."""

    def replaced(keys: Any, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if not over_last(x, [dim]):
            whole: torch.Tensor = original.call_boxed(keys, x, dim, half_to_float)
            return whole
        rows = x.reshape(-1, x.size(-1))
        out = in_tiles(rows, REDUCE_TILE, lambda part: original.call_boxed(keys, part, 1, half_to_float))
        return out.reshape(x.shape)

    return replaced


REPLACEMENTS: dict[str, Callable[[Any], Kernel]] = {
    "mm": mm,
    "addmm": addmm,
    "bmm": bmm,
    "mean.dim": reduction,
    "sum.dim_IntList": reduction,
    "_softmax": normalisation,
    "_log_softmax": normalisation,
}
