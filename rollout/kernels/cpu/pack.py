"""Weights into the panels that ``dot`` reads: pairs of k, the columns of a panel side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from rollout.kernels.cpu.compiler import carray, intrinsic
from rollout.kernels.cpu.prefetch import LINE, call_line
from rollout.kernels.cpu.team import JOBS, entry, pointer, take_jobs
from rollout.kernels.cpu.vector import WIDTH, index, matrices, row_of

PANEL = 64
"""Columns of a packed weight panel: four vectors"""
PACK_FIELDS = "q" * 6
_COLUMN = 4
"""Bytes from one column of a panel to the next"""
_WORDS = ir.VectorType(ir.IntType(32), WIDTH)


def _turning(past_the_cache: bool) -> Callable[..., Any]:
    """An intrinsic: target[j, i] = source[i, j] for the first sixteen of both; blocks of 8, 4, 2 and 1 change places.

    Args:
        past_the_cache: a panel is written once and read much later: its lines, which must be whole and aligned, are not
            read first. The lines of the source that come next are called for.
    """

    def turn(typing: Any, source: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            read, written = matrices(context, builder, signature.args, args)
            places = [[builder.bitcast(row_of(builder, m, index(i)), _WORDS.as_pointer()) for i in range(WIDTH)]
                      for m in (read, written)]  # fmt: skip
            rows = _transposed(builder, [builder.load(place, align=4) for place in places[0]])
            for row, place in zip(rows, places[1], strict=True):
                stored = builder.store(row, place, align=LINE if past_the_cache else 4)
                if past_the_cache:
                    once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                    stored.set_metadata("nontemporal", once)
            for place in places[0] if past_the_cache else ():
                call_line(builder, builder.gep(place, [index(1)]))
            return context.get_dummy_value()

        return types.none(source, target), generate

    return intrinsic(turn)


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    rows, size = list(rows), WIDTH // 2
    while size:
        for i in (i for i in range(WIDTH) if not i & size):
            low = [j if not j & size else WIDTH + j - size for j in range(WIDTH)]
            high = [j + size if not j & size else WIDTH + j for j in range(WIDTH)]
            one, other = rows[i], rows[i + size]
            rows[i], rows[i + size] = (
                builder.shuffle_vector(one, other, ir.Constant(_WORDS, mask)) for mask in (low, high)
            )
        size //= 2
    return rows


_turn, _turn_past = _turning(False), _turning(True)


@intrinsic
def _fence(typing: Any) -> Any:
    """Writes past the cache are seen by others before whatever follows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), generate


@numba.njit(error_model="numpy")
def _pack_rows(weight: np.ndarray, panel: np.ndarray, column: int, aligned: bool) -> None:
    """Rows uint32 [R, K / 2] as the columns of a panel [K / 2, 64] from ``column`` on."""
    rows, pairs = weight.shape
    for start in range(0, pairs, WIDTH):
        for row in range(0, rows, WIDTH):
            if row + WIDTH <= rows and start + WIDTH <= pairs:
                if aligned:
                    _turn_past(weight[row:, start:], panel[start:, column + row :])
                else:
                    _turn(weight[row:, start:], panel[start:, column + row :])
            else:
                for r in range(row, min(row + WIDTH, rows)):
                    for pair in range(start, min(start + WIDTH, pairs)):
                        panel[pair, column + r] = weight[r, pair]


@functools.lru_cache(maxsize=1)
def pack_entry() -> Any:
    """Jobs are panels. Weight [rows, K / 2], panels, rows, K / 2, panel of the first row, its column there."""

    def pack(address: Any) -> None:
        block = carray(address, 9, np.int64)
        rows, pairs, shift = block[5], block[6], block[8]
        weight = carray(pointer(block[3]), (rows, pairs), np.uint32)
        panels = carray(pointer(block[4]), (block[7] + block[JOBS], pairs, PANEL), np.uint32)
        while True:
            first, last = take_jobs(block)
            if first >= last:
                _fence()
                return
            for job in range(first, last):
                begin, end = max(0, job * PANEL - shift), min(rows, (job + 1) * PANEL - shift)
                column = begin + shift - job * PANEL
                aligned = (block[4] + column * _COLUMN) % LINE == 0
                _pack_rows(weight[begin:end], panels[block[7] + job], column, aligned)

    return entry(pack)
