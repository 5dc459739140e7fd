"""Lengths at which a reduction may change its order: data of a kernel set, read by the certificate's generator.

A rule says: lengths n whose ``n mod period`` lies in [first, last] may be reduced in another order than their
neighbours. The generator takes lengths on both sides of each border and inside, so that a battery never depends on
somebody remembering where the borders of today's kernel are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthEdge:
    """One rule."""

    period: int
    """tokens, >= 2"""
    first: int
    """first remainder of the suspected range; 0 <= first <= last < period"""
    last: int
    reason: str

    def around(self, multiple: int) -> tuple[int, ...]:
        """Lengths at the range's borders and in its middle, counted from ``multiple`` periods."""
        start = multiple * self.period
        first, last = start + self.first, start + self.last
        return first - 1, first, (first + last) // 2, last, last + 1


def page_edge(page_size: int) -> LengthEdge:
    """Every kernel set starts a new page at a multiple of the page size."""
    return LengthEdge(page_size, 0, 0, "KV page")


FA3_NPU_EDGES: tuple[LengthEdge, ...] = (
    LengthEdge(512, 192, 254, "row sum of the last KV tile: 256 wide in prefill, narrower in decode"),
    LengthEdge(512, 384, 510, "row sum of the last KV tile: 512 wide in prefill, narrower in decode"),
    LengthEdge(128, 0, 0, "query tile"),
    LengthEdge(512, 0, 0, "KV tile"),
)
"""flash-attention-npu 0.1 and 0.3: predicted from its tiling source, for the NPU set; not run on such a device."""


def edge_lengths(edges: Sequence[LengthEdge], longest: int, *, multiples: int | None = None) -> tuple[int, ...]:
    """Sorted lengths in [1, longest]: 1, 2, and what every rule asks for.

    Args:
        multiples: how many periods of each rule to visit; None for all that fit.
    """
    lengths = {1, 2, longest}
    for edge in edges:
        count = longest // edge.period + 1
        for multiple in range(count if multiples is None else min(count, multiples + 1)):
            lengths.update(edge.around(multiple))
    return tuple(sorted(n for n in lengths if 1 <= n <= longest))
