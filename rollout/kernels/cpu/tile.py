"""The register tile under attention: c[R, L] (+)= a[R, K] b[K, L], summed over K in order with fused multiply-add.

Every element of c is one chain of ``fma`` over k = 0, 1, 2, ...; IEEE 754 fixes its bits. How many rows and lanes a
tile holds, and on which machine, changes speed only. The tiles are written as LLVM vectors, since autovectorised loops
here ran an order of magnitude below what the cores can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import types

from rollout.kernels.cpu.compiler import cgutils, intrinsic
from rollout.kernels.cpu.vector import WIDTH, constant, index, matrices, row_of, splat, widen


def _load(builder: Any, pointer: Any, stored: Any, lanes: int) -> Any:
    """``lanes`` stored values at ``pointer`` as float32."""
    if stored != types.uint16:
        kind = ir.VectorType(ir.FloatType(), lanes)
        return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4)
    halves = ir.VectorType(ir.IntType(16), lanes)
    return widen(builder, builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2))


def _make_tile(rows: int, vectors: int, lanes: int) -> Callable[..., Any]:
    @intrinsic
    def tile(typing: Any, a: Any, b: Any, c: Any, depth: Any, fresh: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, right, out = matrices(context, builder, signature.args[:3], args[:3])
            step = ir.VectorType(ir.FloatType(), lanes)
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(step, [step] * 3), f"llvm.fma.v{lanes}f32"
            )

            def target(r: int, v: int) -> Any:
                place = builder.gep(row_of(builder, out, index(r)), [index(v * lanes)])
                return builder.bitcast(place, step.as_pointer())

            sums = {(r, v): cgutils.alloca_once(builder, step) for r in range(rows) for v in range(vectors)}
            with builder.if_else(builder.trunc(args[4], ir.IntType(1))) as (zero, load):
                with zero:
                    for place in sums.values():
                        builder.store(constant(step, 0.0), place)
                with load:
                    for (r, v), place in sums.items():
                        builder.store(builder.load(target(r, v), align=4), place)
            lefts = [row_of(builder, left, index(r)) for r in range(rows)]
            with cgutils.for_range(builder, args[3]) as loop:
                here = row_of(builder, right, loop.index)
                columns = [
                    _load(builder, builder.gep(here, [index(v * lanes)]), signature.args[1].dtype, lanes)
                    for v in range(vectors)
                ]
                for r in range(rows):
                    factor = splat(builder, builder.load(builder.gep(lefts[r], [loop.index])), lanes)
                    for v in range(vectors):
                        place = sums[r, v]
                        builder.store(builder.call(fma, [factor, columns[v], builder.load(place)]), place)
            for (r, v), place in sums.items():
                builder.store(builder.load(place), target(r, v), align=4)
            return context.get_dummy_value()

        return types.none(a, b, c, types.intp, types.boolean), generate

    return tile


def _make_row_block(rows: int) -> Callable[..., Any]:
    """All columns of c for ``rows`` rows: tiles of four vectors, two, one, then single columns."""
    four, two, one, single = (_make_tile(rows, v, lanes) for v, lanes in ((4, WIDTH), (2, WIDTH), (1, WIDTH), (1, 1)))

    @numba.njit(inline="never", error_model="numpy")
    def block(a: Any, b: Any, c: Any, depth: int, fresh: bool) -> None:
        columns, at = c.shape[1], 0
        while columns - at >= 4 * WIDTH:
            four(a, b[:, at:], c[:, at:], depth, fresh)
            at += 4 * WIDTH
        if columns - at >= 2 * WIDTH:
            two(a, b[:, at:], c[:, at:], depth, fresh)
            at += 2 * WIDTH
        if columns - at >= WIDTH:
            one(a, b[:, at:], c[:, at:], depth, fresh)
            at += WIDTH
        while at < columns:
            single(a, b[:, at:], c[:, at:], depth, fresh)
            at += 1

    return block


_rows1, _rows2, _rows3, _rows4, _rows6 = (_make_row_block(r) for r in (1, 2, 3, 4, 6))


@numba.njit(error_model="numpy")
def multiply(a: Any, b: Any, c: Any, depth: int, fresh: bool) -> None:
    """c (+)= a[:, :depth] b[:depth]; ``fresh`` starts from zero.

    Args:
        a: float32 [R, >= depth]. b: float32 or uint16 (bfloat16 bits) [>= depth, L]; rows from ``depth`` on are not
            read. c: float32 [R, L]. Inner strides are 1.
    """
    rows, r = a.shape[0], 0
    while rows - r >= 6:
        _rows6(a[r:], b, c[r:], depth, fresh)
        r += 6
    if rows - r >= 4:
        _rows4(a[r:], b, c[r:], depth, fresh)
        r += 4
    if rows - r == 3:
        _rows3(a[r:], b, c[r:], depth, fresh)
    elif rows - r == 2:
        _rows2(a[r:], b, c[r:], depth, fresh)
    elif rows - r == 1:
        _rows1(a[r:], b, c[r:], depth, fresh)
