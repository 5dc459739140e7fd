"""Float64 values of attention from the queries, keys and values both sides share, right and with a usual fault."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from rollout import oracle
from trainer_bridge.explain.operation import ROUNDED, Inputs, Variant

_MOST_PAGES = 6
_WINDOWS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def attentions(x: Inputs) -> Iterator[Variant]:
    """Attention first, then the usual faults."""
    scale = x.sizes.head_dim**-0.5
    yield Variant("", _attended)
    if x.sizes.heads != x.sizes.kv_heads:
        yield Variant("query heads paired with KV heads in turn (0, 1, 0, 1) instead of in groups (0, 0, 1, 1)",
                      partial(_attended, tiled=True))  # fmt: skip
    yield Variant("every row sees one key too many (causal mask off by one)", partial(_attended, shift=1))
    yield Variant("every row misses its own key (causal mask off by one)", partial(_attended, shift=-1))
    yield Variant("no causal mask", partial(_attended, shift=1 << 30))
    for window in _WINDOWS:
        if window <= int(x.rows.max()):
            yield Variant(f"a sliding window of {window} keys", partial(_attended, window=window))
            yield Variant(f"a sliding window of {window + 1} keys", partial(_attended, window=window + 1))
    for words, by in (
        ("no scale", 1.0),
        ("scale 1 / D instead of its root", scale**2),
        ("the scale applied twice", scale**2),
        ("the scale of the hidden size", (x.sizes.head_dim * x.sizes.heads) ** -0.5),
        ("the scale of twice the head size", scale * 2**-0.5),
        ("the scale of half the head size", scale * 2**0.5),
    ):
        yield Variant(words, partial(_attended, by=by))
    for cap in (20.0, 30.0, 50.0):
        yield Variant(f"scores capped at {cap:g} (tanh)", partial(_attended, cap=cap))
    for dtype in (*ROUNDED.get(x.dtype, ()),):
        name = str(dtype).removeprefix("torch.")
        yield Variant(f"keys and values rounded to {name}", partial(_attended, dtype=dtype))
    yield Variant("the first key left out", partial(_attended, without=1))
    yield from _paged(x)


def _paged(x: Inputs) -> Iterator[Variant]:
    """Pages in each other's place: the rows of one are read as those of the other."""
    size = len(x.value("keys"))
    pages = -(-size // x.page) if x.page else 0
    for one in range(min(pages, _MOST_PAGES)):
        for two in range(one + 1, min(pages, _MOST_PAGES)):
            yield Variant(f"KV pages {one} and {two} in each other's place", partial(_attended, pages=(one, two)))
    if pages > 2:
        yield Variant("KV pages in reversed order", partial(_attended, pages=(0, -1)))


def _attended(
    i: Inputs,
    *,
    tiled: bool = False,
    by: float | None = None,
    window: int = 0,
    shift: int = 0,
    cap: float = 0.0,
    dtype: torch.dtype | None = None,
    without: int = 0,
    pages: tuple[int, int] | None = None,
) -> torch.Tensor:
    q, k, v = (i.value(n).transpose(0, 1) for n in ("queries", "keys", "values"))
    by = i.sizes.head_dim**-0.5 if by is None else by
    if dtype is not None:
        k, v = k.to(dtype).double(), v.to(dtype).double()
    if pages is not None:
        order = _page_order(k.size(1), i.page, pages)
        k, v = k[:, order], v[:, order]
    if tiled:
        group = q.size(0) // k.size(0)
        k, v = k.repeat(group, 1, 1), v.repeat(group, 1, 1)
    outs = [
        oracle.attend(
            q[:, r : r + 1], k, v, by, first=r, window=window, shift=shift, cap=cap, without=without if r else 0
        )
        for r in i.rows.tolist()
    ]
    return torch.cat(outs, 1).transpose(0, 1)


def _page_order(size: int, page: int, pair: tuple[int, int]) -> torch.Tensor:
    """Which row is read for each row; rows that the swapped page does not have are their own."""
    rows = torch.arange(size)
    number, offset = rows // page, rows % page
    if pair[1] < 0:
        moved = int(number[-1]) - number
    else:
        moved = number.clone()
        moved[number == pair[0]], moved[number == pair[1]] = pair[1], pair[0]
    source = moved * page + offset
    return torch.where(source < size, source, rows)
