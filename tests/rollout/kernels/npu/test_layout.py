"""Layouts of calls: widths of tiles, places of rows, lengths worth probing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import InvalidRequest
from rollout.kernels.npu.layout import (
    QUERY_TILE,
    CallLayout,
    check_lengths,
    differing_positions,
    last_tile_width,
    plain,
    probe_lengths,
    row_by_row,
    tile_aligned,
)

STEP = st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 400)), min_size=1, max_size=6)
"""(keys before, rows) of each sequence"""


def arrays(step: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([n for _, n in step], np.int32), np.array([p + n for p, n in step], np.int32)


def widths(layout: CallLayout) -> dict[int, int]:
    """Row of the step -> width of its last key tile."""
    starts, found = np.cumsum(layout.q_lengths) - layout.q_lengths, {}
    for source, target in zip(layout.source, layout.target, strict=True):
        b = int(np.searchsorted(starts, target, side="right")) - 1
        found[int(source)] = last_tile_width(
            int(target - starts[b]), int(layout.q_lengths[b]), int(layout.k_lengths[b])
        )
    return found


def position_of_row(layout: CallLayout, i: int) -> int:
    """Position of the i-th real row by the causal rule: keys - rows + place."""
    starts = np.cumsum(layout.q_lengths) - layout.q_lengths
    b = int(np.searchsorted(starts, layout.target[i], side="right")) - 1
    return int(layout.k_lengths[b] - layout.q_lengths[b] + layout.target[i] - starts[b])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(step=STEP)
def test_tile_aligned_width_is_of_the_position_alone(step: list[tuple[int, int]]) -> None:
    q, k = arrays(step)
    layout = tile_aligned(np.arange(len(step)), q, k)
    positions = [p + i for p, n in step for i in range(n)]
    assert layout.source.tolist() == list(range(len(positions)))
    found = widths(layout)
    for row, position in enumerate(positions):
        assert found[row] == (position // QUERY_TILE * QUERY_TILE + QUERY_TILE - 1) % 512 + 1
        assert position_of_row(layout, row) == position, "a padded row sees other keys"
    assert (layout.k_lengths % QUERY_TILE == 0).all() and (layout.k_lengths - k < QUERY_TILE).all()
    assert len(set(layout.target.tolist())) == len(positions) and layout.rows == layout.q_lengths.sum()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(step=STEP, lay_out=st.sampled_from([plain, row_by_row]))
def test_every_row_keeps_its_position(step: list[tuple[int, int]], lay_out: object) -> None:
    q, k = arrays(step)
    layout = lay_out(np.arange(len(step)), q, k)  # type: ignore[operator]
    positions = [p + i for p, n in step for i in range(n)]
    assert [position_of_row(layout, i) for i in range(len(positions))] == positions


def test_a_group_of_the_step() -> None:
    q, k = arrays([(5, 1), (0, 130), (300, 1)])
    layout = plain(np.array([0, 2]), q, k)
    assert layout.source.tolist() == [0, 131] and layout.target.tolist() == [0, 1] and not layout.whole
    assert plain(np.arange(3), q, k).whole and not tile_aligned(np.arange(3), q, k).whole
    decode = tile_aligned(np.array([2]), q, k)
    assert (decode.q_lengths.tolist(), decode.k_lengths.tolist(), decode.target.tolist()) == ([84], [384], [0])


def test_plain_widths_differ_where_predicted() -> None:
    """facts: p mod 512 in [192, 254] or [384, 510], for a sequence whose last tile is whole."""
    expected = [p for p in range(1024) if 192 <= p % 512 <= 254 or 384 <= p % 512 <= 510]
    assert differing_positions(1024) == expected
    # A last tile that is neither 256 nor 512 wide on the trainer's side sums as decode does.
    assert differing_positions(250) == [] and max(differing_positions(500)) == 254


def test_more_rows_than_keys_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="sequence 1 has 5 query rows and 2 keys"):
        check_lengths(np.array([1, 5], np.int32), np.array([1, 2], np.int32))


def test_probe_lengths() -> None:
    lengths = probe_lengths(1100)
    assert {127, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 1025} <= set(lengths)
    assert set(lengths) & set(differing_positions(512)) and max(lengths) <= 1100 and min(lengths) == 1
    assert probe_lengths(1) == (1,)
