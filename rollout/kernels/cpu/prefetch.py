"""Memory called for ahead of its use; no value depends on it."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from rollout.kernels.cpu.compiler import cgutils, intrinsic
from rollout.kernels.cpu.vector import index

LINE = 64
"""Bytes of a cache line."""


def call_line(builder: Any, address: Any) -> None:
    """Call a cache line, which need not be readable memory, into the second-level cache."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.bitcast(address, byte), *(ir.Constant(word, n) for n in (0, 2, 1))])


@intrinsic
def call_for(typing: Any, a: Any, count: Any) -> Any:
    """Call the first ``count`` bytes of a contiguous array into the second-level cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        start = builder.bitcast(data, ir.IntType(8).as_pointer())
        with cgutils.for_range_slice(builder, index(0), args[1], index(LINE)) as (at, _):
            call_line(builder, builder.gep(start, [at]))
        return context.get_dummy_value()

    return types.none(a, types.intp), generate
