"""The cells of parts as arrays by dimension, and their sums: what every view is drawn from.

A part's cells are turned into arrays once, when the part is read. A view joins those of the steps it shows and counts
them, so nothing is built anew when a step is added, and token rows are never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """C cells of one dimension, side by side."""

    key: tuple[str, ...]
    """[C] names; empty where the dimension goes by ``bin``"""
    bin: IntArray
    tokens: IntArray
    unequal: IntArray
    max_abs: FloatArray
    sum_abs: FloatArray
    sum_k3: FloatArray

    def __len__(self) -> int:
        """C."""
        return self.bin.size


_WHOLE, _REAL = np.empty(0, np.int64), np.empty(0)
_NONE = Cells((), _WHOLE, _WHOLE, _WHOLE, _REAL, _REAL, _REAL)
_INTEGERS, _FLOATS = ("bin", "tokens", "unequal"), ("max_abs", "sum_abs", "sum_k3")
_BY_NAME = frozenset({"replica", "version", "filter"})


def cells_of(groups: pa.Table) -> dict[str, Cells]:
    """Dimension -> cells, from rows of ``schema.GROUP``."""
    columns = {name: groups.column(name).to_numpy() for name in (*_INTEGERS, *_FLOATS)}
    dimensions = groups.column("dimension").to_numpy(zero_copy_only=False)
    keys = groups.column("key")
    # Rows of a dimension stand together, as they were written.
    edges = [0, *(np.flatnonzero(dimensions[1:] != dimensions[:-1]) + 1).tolist(), len(dimensions)]
    found: dict[str, Cells] = {}
    for low, high in pairwise(edges):
        if low == high:
            continue
        name = str(dimensions[low])
        part = Cells(
            tuple(keys.slice(low, high - low).to_pylist()) if name in _BY_NAME else (),
            *(columns[c][low:high].astype(np.int64) for c in _INTEGERS),
            *(columns[c][low:high].astype(np.float64) for c in _FLOATS),
        )
        found[name] = join([found[name], part]) if name in found else part
    return found


def join(parts: Sequence[Cells]) -> Cells:
    """Cells of several parts, one after the other."""
    if not parts:
        return _NONE
    return Cells(
        tuple(key for part in parts for key in part.key),
        *(np.concatenate([getattr(part, name) for part in parts]) for name in (*_INTEGERS, *_FLOATS)),
    )


def sums_by_bin(cells: Cells) -> tuple[IntArray, IntArray, IntArray]:
    """Bins in order, tokens and unequal tokens of each."""
    if not len(cells):
        return _NONE.bin, _NONE.tokens, _NONE.unequal
    low = int(cells.bin.min())
    width = int(cells.bin.max()) - low + 1
    place = cells.bin - low
    tokens, unequal = (_count(place, values, width) for values in (cells.tokens, cells.unequal))
    # A cell without tokens is never written, so a bin that is there has some.
    there = np.flatnonzero(tokens)
    return there + low, tokens[there], unequal[there]


@dataclass(slots=True)
class Total:
    """What the cells of one group add up to."""

    tokens: int = 0
    unequal: int = 0
    max_abs: float = 0.0
    sum_abs: float = 0.0
    sum_k3: float = 0.0


def totals(cells: Cells, names: Iterable[str | int]) -> dict[str | int, Total]:
    """Group -> sums, for C cells and the group of each."""
    found: dict[str | int, Total] = {}
    columns = [cells.tokens, cells.unequal, cells.max_abs, cells.sum_abs, cells.sum_k3]
    for name, tokens, unequal, largest, sum_abs, sum_k3 in zip(names, *(c.tolist() for c in columns), strict=True):
        total = found.setdefault(name, Total())
        total.tokens += tokens
        total.unequal += unequal
        total.max_abs = max(total.max_abs, largest)
        total.sum_abs += sum_abs
        total.sum_k3 += sum_k3
    return found


def heat(parts: Sequence[tuple[int, Cells]]) -> list[list[int | float]]:
    """[row, bin, tokens, unequal, max |D|] in order of row and bin, for cells and the row of each part."""
    if not parts:
        return []
    cells = join([part for _, part in parts])
    rows = np.repeat(np.array([row for row, _ in parts], np.int64), [len(part) for _, part in parts])
    order = np.lexsort((cells.bin, rows))
    rows, bins = rows[order], cells.bin[order]
    first = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]) | (bins[1:] != bins[:-1])][: rows.size])
    if not first.size:
        return []
    sums = (np.add.reduceat(values[order], first) for values in (cells.tokens, cells.unequal))
    largest = np.maximum.reduceat(cells.max_abs[order], first)
    columns = (rows[first], bins[first], *sums, largest)
    return [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _count(place: IntArray, values: IntArray, width: int) -> IntArray:
    # bincount weighs in float64, which is exact for counts below 2**53.
    return np.bincount(place, weights=values, minlength=width).astype(np.int64)
