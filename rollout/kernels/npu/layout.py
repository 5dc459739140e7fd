"""Host-side layouts of attention calls: which rows go where, made once a step with numpy, used by every layer.

FA3 on the NPU takes queries in tiles of 128 rows counted from the first row of the call, and keys in tiles of 512
counted from key 0. The last key tile of a query tile b is min(kv, (b + 1) * 128 + kv - q) mod 512 wide.
``tile_aligned`` makes that width a function of the position alone: the keys of a call end at a multiple of 128, and a
query tile never crosses one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest

QUERY_TILE = 128
"""rows"""
KEY_TILE = 512
"""keys"""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CallLayout:
    """One call over b sequences: R rows, of which n are real; the others are zeros whose results are dropped."""

    sequences: Int64
    """[b] which sequences of the step take part"""
    source: Int64
    """[n] row of the step that each real row is"""
    target: Int64
    """[n] row of the call at which it stands"""
    rows: int
    """R"""
    step_rows: int
    """T rows of the step"""
    q_lengths: Int32
    """[b] rows per sequence, dummies included; sums to R"""
    k_lengths: Int32
    """[b] keys per sequence, the padded tail included"""

    @property
    def cu_seqlens_q(self) -> Int32:
        """[b + 1]"""
        return edges(self.q_lengths)

    @property
    def max_seqlen_q(self) -> int:
        """Longest sequence in rows; 0 without any."""
        return int(self.q_lengths.max(initial=0))

    @property
    def whole(self) -> bool:
        """Whether the call's rows are the step's rows, in order, with nothing added."""
        return len(self.source) == self.rows == self.step_rows and bool(
            np.array_equal(self.source, np.arange(self.rows))
        )


def edges(lengths: npt.ArrayLike) -> Int32:
    """[b] -> [b + 1] running sums from 0."""
    return np.concatenate(([0], np.cumsum(np.asarray(lengths)))).astype(np.int32)


def check_lengths(q_lengths: Int32, k_lengths: Int32) -> None:
    """Raise InvalidRequest where a sequence has more rows than keys: releases disagree about such rows."""
    if bad := np.flatnonzero(q_lengths > k_lengths).tolist():
        b = bad[0]
        raise InvalidRequest(
            f"sequence {b} has {q_lengths[b]} query rows and {k_lengths[b]} keys; on the NPU rows before the first key "
            "mean different things in different releases of flash_attn_npu: give no more rows than keys"
        )


def plain(sequences: Int64, q_lengths: Int32, k_lengths: Int32) -> CallLayout:
    """The rows of the chosen sequences as they are."""
    starts = edges(q_lengths)
    rows = _joined([np.arange(starts[b], starts[b + 1]) for b in sequences])
    return CallLayout(
        sequences=sequences,
        source=rows,
        target=np.arange(len(rows)),
        rows=len(rows),
        step_rows=int(starts[-1]),
        q_lengths=q_lengths[sequences],
        k_lengths=k_lengths[sequences],
    )


def tile_aligned(sequences: Int64, q_lengths: Int32, k_lengths: Int32) -> CallLayout:
    """Keys up to the next multiple of 128; dummy rows behind, and in front where rows cross a multiple of 128."""
    starts = edges(q_lengths)
    chosen_k = k_lengths[sequences].astype(np.int64)
    first = chosen_k - q_lengths[sequences]
    keys = -(-chosen_k // QUERY_TILE) * QUERY_TILE
    crosses = first // QUERY_TILE < (chosen_k - 1) // QUERY_TILE
    front = np.where(crosses, first % QUERY_TILE, 0)
    rows = keys - first + front
    offsets = np.cumsum(rows) - rows + front
    source = [np.arange(starts[b], starts[b + 1]) for b in sequences]
    target = [o + np.arange(len(s)) for o, s in zip(offsets, source, strict=True)]
    return CallLayout(
        sequences=sequences,
        source=_joined(source),
        target=_joined(target),
        rows=int(rows.sum()),
        step_rows=int(starts[-1]),
        q_lengths=rows.astype(np.int32),
        k_lengths=keys.astype(np.int32),
    )


def _joined(parts: list[np.ndarray]) -> Int64:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def row_by_row(sequences: Int64, q_lengths: Int32, k_lengths: Int32) -> CallLayout:
    """Every row a decode call of its own: as many one-row sequences as rows."""
    starts = edges(q_lengths)
    owner = np.repeat(sequences, q_lengths[sequences])
    within = _joined([np.arange(q_lengths[b]) for b in sequences])
    source = (starts[owner] + within).astype(np.int64)
    keys = (k_lengths[owner] - q_lengths[owner] + within + 1).astype(np.int32)
    return CallLayout(
        sequences=owner,
        source=source,
        target=np.arange(len(source)),
        rows=len(source),
        step_rows=int(starts[-1]),
        q_lengths=np.ones(len(source), np.int32),
        k_lengths=keys,
    )


def last_tile_width(row: int, q_length: int, k_length: int) -> int:
    """Columns of the last key tile that query row ``row`` of a causal call sees, masked ones included."""
    end = min(k_length, (row // QUERY_TILE + 1) * QUERY_TILE + k_length - q_length)
    return (end - 1) % KEY_TILE + 1


def sum_order(width: int) -> int:
    """Which of the later line's three row sums a tile of this width takes."""
    return width if width in (256, 512) else 0


def differing_positions(length: int) -> list[int]:
    """Positions of a sequence at which, on the later line, plain decode sums otherwise than plain training does.

    A sum over fewer than 192 live columns is the same in both orders: the tree's later halves are zeros.
    """
    found = []
    for p in range(length):
        decode, train = last_tile_width(0, 1, p + 1), last_tile_width(p, length, length)
        live = p % KEY_TILE + 1
        if sum_order(decode) != sum_order(train) and live > 192:
            found.append(p)
    return found


def probe_lengths(longest: int) -> tuple[int, ...]:
    """Lengths around every edge of these kernels, up to ``longest``: 16 rows, query tiles, the widths 256 and 512."""
    marks = {1, 2, 16, 17, 64, 65, 193, 200, 224, 254, 385, 401, 448, 500, 510}
    for edge in range(QUERY_TILE, longest + QUERY_TILE, QUERY_TILE):
        marks |= {edge - 1, edge, edge + 1}
    marks |= {KEY_TILE + m for m in (1, 64, 193, 224, 254, 385, 500, 510)}
    return tuple(sorted(m for m in marks if 1 <= m <= longest))
