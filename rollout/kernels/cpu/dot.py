"""Products of few rows with bfloat16 weights, in the order of arithmetic that the training side's oneDNN uses.

y[r, n] is a chain of AVX512 ``vdpbf16ps`` over pairs of k, started from zero at every ``block`` of k; the chains of
the blocks are added in order in float32 and rounded once. By experiment that is what oneDNN's brgemm does (blocks of
512 up to K = 1024, of 1024 beyond), so the bits agree; whether they do on this machine is measured at load for every
shape (``linear``), never assumed. Rows are independent by construction, one included.

What is gained: weights are read as one stream in the order of use, and a call costs three microseconds, not fifteen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types

from rollout.kernels.cpu.compiler import carray, cgutils, intrinsic
from rollout.kernels.cpu.pack import PACK_FIELDS, PANEL, pack_entry
from rollout.kernels.cpu.prefetch import LINE, call_line
from rollout.kernels.cpu.team import Call, entry, pointer, take_jobs
from rollout.kernels.cpu.vector import FLOATS, WIDTH, constant, index, matrices, put, row_of, splat, take

BLOCKS = (512, 1024)
"""Lengths of k after which a chain may start anew, as candidates"""
ROWS = 96
"""Rows of one job: they and a panel stay in a core's cache"""
_VECTORS = PANEL // WIDTH
_LINE = LINE // 4
"""Pairs of a cache line."""
_LINES_A_PAIR = PANEL // _LINE
_WORTH_A_THREAD = 65536
_PAIRS = ir.VectorType(ir.IntType(32), WIDTH)
_FIELDS = "q" * 8


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite's builder has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


@functools.lru_cache(maxsize=1)
def available() -> bool:
    """Whether this processor has the instruction."""
    return bool(llvm.get_host_cpu_features().get("avx512bf16", False))


def _make_tile(rows: int, fetched: int) -> Callable[..., Any]:
    @intrinsic
    def tile(typing: Any, x: Any, panel: Any, out: Any, first: Any, last: Any, part: Any) -> Any:
        """out[r] (+)= chain over pairs [first, last); added to what is there unless first is 0.

        Meanwhile ``fetched`` cache lines a pair are called for, out of the block behind ``last``; ``part`` of them
        came before.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, weights, target = matrices(context, builder, signature.args[:3], args[:3])
            pairs = ir.VectorType(_BFloat(), 2 * WIDTH)
            kind = ir.FunctionType(FLOATS, [FLOATS, pairs, pairs])
            dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")

            sums = {(r, v): cgutils.alloca_once(builder, FLOATS) for r in range(rows) for v in range(_VECTORS)}
            for place in sums.values():
                builder.store(constant(FLOATS, 0.0), place)
            lefts = [row_of(builder, source, index(r)) for r in range(rows)]
            behind = row_of(builder, weights, args[4])
            done = builder.mul(builder.sub(args[4], args[3]), builder.mul(args[5], index(fetched)))
            with cgutils.for_range_slice(builder, args[3], args[4], index(1)) as (pair, _):
                here = row_of(builder, weights, pair)
                for number in range(fetched):
                    line = builder.add(done, builder.mul(builder.sub(pair, args[3]), index(fetched)))
                    line = builder.mul(builder.add(line, index(number)), index(_LINE))
                    call_line(builder, builder.gep(behind, [line]))
                columns = []
                for v in range(_VECTORS):
                    place = builder.bitcast(builder.gep(here, [index(v * WIDTH)]), _PAIRS.as_pointer())
                    columns.append(builder.bitcast(builder.load(place, align=4), pairs))
                for r in range(rows):
                    factor = builder.bitcast(splat(builder, builder.load(builder.gep(lefts[r], [pair]))), pairs)
                    for v in range(_VECTORS):
                        place = sums[r, v]
                        builder.store(builder.call(dot, [builder.load(place), factor, columns[v]]), place)
            fresh = builder.icmp_signed("==", args[3], index(0))
            for (r, v), place in sums.items():
                kept = builder.gep(row_of(builder, target, index(r)), [index(v * WIDTH)])
                kept = builder.bitcast(kept, FLOATS.as_pointer())
                before = builder.load(kept, align=4)
                total = builder.fadd(before, builder.load(place))
                builder.store(builder.select(fresh, builder.load(place), total), kept, align=4)
            return context.get_dummy_value()

        return types.none(x, panel, out, types.intp, types.intp, types.intp), generate

    return tile


def _make_step(fetched: int) -> Callable[..., Any]:
    tile1, tile2, tile4, tile6 = (_make_tile(rows, fetched) for rows in (1, 2, 4, 6))

    @numba.njit(error_model="numpy")
    def step(x: np.ndarray, panel: np.ndarray, scratch: np.ndarray, first: int, last: int, part: int) -> int:
        """One block of k for the first rows of x in one tile; how many they are."""
        left = x.shape[0]
        # Eight are two tiles of four: of six and two, the second is too short to hide a wait.
        if left >= 6 and left != 8:
            tile6(x, panel, scratch, first, last, part)
            return 6
        if left >= 4:
            tile4(x, panel, scratch, first, last, part)
            return 4
        if left >= 2:
            tile2(x, panel, scratch, first, last, part)
            return 2
        tile1(x, panel, scratch, first, last, part)
        return 1

    return step


_FETCHING_TILES = 2
_step, _fetching_step = _make_step(0), _make_step(_LINES_A_PAIR // _FETCHING_TILES)


@numba.njit(error_model="numpy")
def _panel_rows(x: np.ndarray, panel: np.ndarray, scratch: np.ndarray, first: int, last: int) -> None:
    """One block of k for all rows: x uint32 [R, K / 2], panel uint32 [K / 2, 64], scratch float32 [R, 64].

    The first tile waits for memory. Those after it find the block in the cache; the first two of them call for the
    block that follows.
    """
    r, tile = 0, 0
    while r < x.shape[0]:
        if 1 <= tile <= _FETCHING_TILES:
            r += _fetching_step(x[r:], panel, scratch[r:], first, last, tile - 1)
        else:
            r += _step(x[r:], panel, scratch[r:], first, last, 0)
        tile += 1


@numba.njit(error_model="numpy")
def _panel_product(
    x: np.ndarray, panel: np.ndarray, step: int, bias: np.ndarray, scratch: np.ndarray, out: np.ndarray, at: int
) -> None:
    """Columns [at, at + 64) of the product, for all rows of x; scratch float32 [R, 64]."""
    pairs = x.shape[1]
    for start in range(0, pairs, step):
        _panel_rows(x, panel, scratch, start, min(start + step, pairs))
    width = min(PANEL, out.shape[1] - at)
    for r in range(x.shape[0]):
        target = out[r, at : at + width]
        for c in range(0, width, WIDTH):
            y = take(scratch[r], c)
            put(target, c, y + take(bias[at : at + width], c) if bias.size > 0 else y)


@functools.lru_cache(maxsize=1)
def _product_entry() -> Any:
    """Jobs are (rows of ROWS, panel), panels first. x, panels, bias (0: none), out, rows, K / 2, columns, block / 2."""

    def product(address: Any) -> None:
        block = carray(address, 11, np.int64)
        rows, pairs, columns = block[7], block[8], block[9]
        panels = (columns + PANEL - 1) // PANEL
        x = carray(pointer(block[3]), (rows, pairs), np.uint32)
        weights = carray(pointer(block[4]), (panels, pairs, PANEL), np.uint32)
        bias = carray(pointer(block[5]), columns if block[5] != 0 else 0, np.uint16)
        out = carray(pointer(block[6]), (rows, columns), np.uint16)
        scratch = np.empty((ROWS, PANEL), np.float32)
        while True:
            first, last = take_jobs(block)
            if first >= last:
                return
            for job in range(first, last):
                number, start = job % panels, job // panels * ROWS
                here = slice(start, min(start + ROWS, rows))
                _panel_product(x[here], weights[number], block[10], bias, scratch, out[here], number * PANEL)

    return entry(product)


class DotProduct:
    """x [T, K] bfloat16 -> [T, N], for few rows. Not for two threads at once.

    Args:
        weights: bfloat16 [N_i, K], K even, one below the other.
        bias: [N], or None.
        block: inner dimensions of a chain.
    """

    block: int
    """may be changed between calls: the panels do not depend on it"""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, block: int) -> None:
        self._columns, self._inner = sum(w.size(0) for w in weights), weights[0].size(1)
        # Pairs of k, columns side by side; the last panel's other columns stay zero.
        shape = -(-self._columns // PANEL), self._inner // 2, PANEL
        self._panels = torch.zeros(shape, dtype=torch.int32)
        self._call = Call(_product_entry(), _FIELDS)
        self._packing = Call(pack_entry(), PACK_FIELDS)
        self.block = block
        self.pack(weights, bias)

    def pack(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        """Take other weights and bias of the same shapes, in place."""
        self._bias, first = bias, 0
        for weight in (w.detach().contiguous() for w in weights):
            rows, pairs = weight.size(0), self._inner // 2
            panel, shift = divmod(first, PANEL)
            self._packing(
                -(-(shift + rows) // PANEL), rows * pairs, _WORTH_A_THREAD,
                weight.data_ptr(), self._panels.data_ptr(), rows, pairs, panel, shift,
            )  # fmt: skip
            first += rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x contiguous [T, K]."""
        rows = x.size(0)
        out = torch.empty(rows, self._columns, dtype=torch.bfloat16)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        sizes = self._inner // 2, self._columns, self.block // 2
        self._call(
            self._panels.size(0) * -(-rows // ROWS), (rows + 4) * self._columns * self._inner, _WORTH_A_THREAD,
            x.data_ptr(), self._panels.data_ptr(), bias, out.data_ptr(), rows, *sizes,
        )  # fmt: skip
        return out
