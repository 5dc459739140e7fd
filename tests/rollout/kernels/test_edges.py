"""Lengths around declared edges, the NPU's among them."""

from __future__ import annotations

import pytest

from rollout.kernels.edges import FA3_NPU_EDGES, LengthEdge, edge_lengths, page_edge
from rollout.kernels.registry import resolve_kernels


def test_a_page_edge() -> None:
    assert edge_lengths([page_edge(16)], 40) == (1, 2, 15, 16, 17, 31, 32, 33, 40)
    assert edge_lengths([page_edge(16)], 40, multiples=1) == (1, 2, 15, 16, 17, 40)


@pytest.mark.parametrize("low", [192, 384])
def test_the_suspected_ranges_of_the_npu(low: int) -> None:
    """p mod 512 in [192, 254] and [384, 510]: both borders from both sides, and the inside, in every period."""
    last = {192: 254, 384: 510}[low]
    lengths = edge_lengths(FA3_NPU_EDGES, 1100)
    for period in (0, 512):
        assert {period + low - 1, period + low, period + last, period + last + 1} <= set(lengths)
        assert any(period + low < n < period + last for n in lengths)


def test_lengths_stay_in_range() -> None:
    lengths = edge_lengths([LengthEdge(8, 0, 6, "x")], 10)
    assert min(lengths) == 1 and max(lengths) == 10


def test_the_cpu_set_declares_its_page() -> None:
    assert any(edge.period == 32 and edge.reason == "KV page" for edge in resolve_kernels(page_size=32).length_edges())
