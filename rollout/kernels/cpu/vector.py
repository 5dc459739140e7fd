"""``Lanes``: sixteen float32 values as one value of compiled code, with IEEE arithmetic lane by lane.

numba vectorises plain loops when it can prove enough about them, and often it cannot; kernels written in lanes are
vectors wherever they run (machines with narrower registers split them), and their text says which sums go in parallel.
The bits are those of the same scalar operations: nothing here contracts or reorders.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import models, overload, register_model

from rollout.kernels.cpu.compiler import cgutils, intrinsic

WIDTH = 16
"""float32 lanes of a vector"""
FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
_WORDS = ir.VectorType(ir.IntType(32), WIDTH)
_HALVES = ir.VectorType(ir.IntType(16), WIDTH)


class LanesType(types.Type):
    """numba's type of a ``Lanes`` value."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes_type = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        super().__init__(manager, frontend_type, FLOATS)  # type: ignore[no-untyped-call]


def constant(kind: Any, value: Any) -> Any:
    """The same constant in every lane of a vector type."""
    return ir.Constant(kind, [value] * kind.count)


def widen(builder: Any, bits: Any) -> Any:
    """bfloat16 bits are the upper half of a float32: <n x i16> -> <n x float>."""
    count = bits.type.count
    words = ir.VectorType(ir.IntType(32), count)
    shifted = builder.shl(builder.zext(bits, words), constant(words, 16))
    return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), count))


def narrow(builder: Any, values: Any) -> Any:
    """Round <16 x float> to bfloat16 bits, to nearest even; a NaN becomes the quiet NaN (see ``elements``)."""
    bits = builder.bitcast(values, _WORDS)
    upper = builder.lshr(bits, constant(_WORDS, 16))
    odd = builder.and_(upper, constant(_WORDS, 1))
    rounded = builder.lshr(builder.add(builder.add(bits, constant(_WORDS, 0x7FFF)), odd), constant(_WORDS, 16))
    sound = builder.fcmp_ordered("ord", values, values)
    return builder.trunc(builder.select(sound, rounded, constant(_WORDS, 0x7FC0)), _HALVES)


def splat(builder: Any, value: Any, lanes: int = WIDTH) -> Any:
    """A scalar in every lane."""
    kind = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, constant(ir.VectorType(ir.IntType(32), lanes), 0))


def index(value: int) -> Any:
    """An address offset."""
    return ir.Constant(ir.IntType(64), value)


def matrices(context: Any, builder: Any, kinds: Any, values: Any) -> list[tuple[Any, Any]]:
    """(first element, bytes from row to row) of two-dimensional arrays whose inner stride is 1."""
    arrays = [context.make_array(kind)(context, builder, value) for kind, value in zip(kinds, values, strict=True)]
    return [(array.data, cgutils.unpack_tuple(builder, array.strides, 2)[0]) for array in arrays]


def row_of(builder: Any, matrix: tuple[Any, Any], number: Any) -> Any:
    """First element of a row."""
    data, stride = matrix
    raw = builder.bitcast(data, ir.IntType(8).as_pointer())
    return builder.bitcast(builder.gep(raw, [builder.mul(stride, number)]), data.type)


def _place(context: Any, builder: Any, array_type: Any, array: Any, at: Any, kind: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


@intrinsic
def _load_whole(typing: Any, array: Any, at: Any) -> Any:
    """Sixteen stored values (float32, or uint16 of bfloat16 bits) from a contiguous 1-D array, widened."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        if kind.dtype == types.uint16:
            return widen(builder, builder.load(_place(context, builder, kind, args[0], args[1], _HALVES), align=2))
        return builder.load(_place(context, builder, kind, args[0], args[1], FLOATS), align=4)

    return lanes_type(array, types.intp), generate


@intrinsic
def _store_whole(typing: Any, array: Any, at: Any, values: Any) -> Any:
    """Store sixteen values, rounded once to the array's type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        if kind.dtype == types.uint16:
            place = _place(context, builder, kind, args[0], args[1], _HALVES)
            builder.store(narrow(builder, args[2]), place, align=2)
        else:
            builder.store(args[2], _place(context, builder, kind, args[0], args[1], FLOATS), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, values), generate


def _copy(builder: Any, source: Any, target: Any, count: Any) -> None:
    with cgutils.for_range(builder, count) as loop:
        builder.store(builder.load(builder.gep(source, [loop.index])), builder.gep(target, [loop.index]))


@intrinsic
def _load_part(typing: Any, array: Any, at: Any, count: Any) -> Any:
    """The first ``count`` of sixteen, zeros for the rest, which are not read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = _HALVES if signature.args[0].dtype == types.uint16 else FLOATS
        held = cgutils.alloca_once(builder, kind)
        builder.store(constant(kind, 0), held)
        source = _place(context, builder, signature.args[0], args[0], args[1], kind.element)
        _copy(builder, source, builder.bitcast(held, kind.element.as_pointer()), args[2])
        values = builder.load(held)
        return widen(builder, values) if kind is _HALVES else values

    return lanes_type(array, types.intp, types.intp), generate


@intrinsic
def _store_part(typing: Any, array: Any, at: Any, count: Any, values: Any) -> Any:
    """Only the first ``count`` of sixteen."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = _HALVES if signature.args[0].dtype == types.uint16 else FLOATS
        held = cgutils.alloca_once(builder, kind)
        builder.store(narrow(builder, args[3]) if kind is _HALVES else args[3], held)
        target = _place(context, builder, signature.args[0], args[0], args[1], kind.element)
        _copy(builder, builder.bitcast(held, kind.element.as_pointer()), target, args[2])
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp, values), generate


@numba.njit(inline="always", error_model="numpy")
def take(array: Any, at: int) -> Any:
    """Up to sixteen stored values from ``at`` on, as Lanes; past the end of the array zeros."""
    return _load_whole(array, at) if at + WIDTH <= array.size else _load_part(array, at, array.size - at)


@numba.njit(inline="always", error_model="numpy")
def put(array: Any, at: int, values: Any) -> None:
    """Store Lanes from ``at`` on, each rounded once to the array's type, as far as the array goes."""
    if at + WIDTH <= array.size:
        _store_whole(array, at, values)
    else:
        _store_part(array, at, array.size - at, values)


@intrinsic
def round_lanes(typing: Any, values: Any, like: Any) -> Any:
    """What a store to an array of ``like``'s type and a load from it would give."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = signature.args[1].dtype
        return widen(builder, narrow(builder, args[0])) if stored == types.uint16 else args[0]

    return lanes_type(values, like), generate


@intrinsic
def in_all_lanes(typing: Any, value: Any) -> Any:
    """float32 -> Lanes."""
    return lanes_type(types.float32), lambda context, builder, signature, args: splat(builder, args[0])


@intrinsic
def lane(typing: Any, values: Any, number: Any) -> Any:
    """One lane as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], builder.trunc(args[1], ir.IntType(32)))

    return types.float32(values, types.intp), generate


@intrinsic
def lanes_below(typing: Any, values: Any, count: Any, other: Any) -> Any:
    """``values`` in the first ``count`` lanes, ``other`` in the rest."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = ir.Constant(_WORDS, list(range(WIDTH)))
        limit = splat(builder, builder.trunc(args[1], ir.IntType(32)))
        return builder.select(builder.icmp_signed("<", numbers, limit), args[0], args[2])

    return lanes_type(values, types.intp, other), generate


def _choice(comparison: str) -> Callable[..., Any]:
    @intrinsic
    def choose(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.select(builder.fcmp_ordered(comparison, *args), *args)

        return lanes_type(a, b), generate

    return choose


highest_lanes, lowest_lanes = _choice(">"), _choice("<")
"""Lane by lane ``a if a > b else b`` (or <): b where a is NaN."""


@intrinsic
def exponent_lanes(typing: Any, whole: Any) -> Any:
    """2**n for integral n in [-126, 127]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = builder.add(builder.fptosi(args[0], _WORDS), constant(_WORDS, 127))
        return builder.bitcast(builder.shl(number, constant(_WORDS, 23)), FLOATS)

    return lanes_type(whole), generate


@intrinsic
def zero_below(typing: Any, values: Any, x: Any, limit: Any) -> Any:
    """``values``, but 0 where x < limit and x itself where x is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, x, limit = args
        kept = builder.select(builder.fcmp_ordered("<", x, limit), constant(FLOATS, 0.0), values)
        return builder.select(builder.fcmp_ordered("ord", x, x), kept, x)

    return lanes_type(values, x, limit), generate


def _arithmetic(instruction: str) -> Callable[..., Any]:
    @intrinsic
    def apply(typing: Any, a: Any, b: Any) -> Any:
        return lanes_type(a, b), lambda context, builder, signature, args: getattr(builder, instruction)(*args)

    return apply


def _overload(symbol: Callable[..., Any], instruction: str) -> None:
    apply = _arithmetic(instruction)

    @overload(symbol)
    def typed(a: Any, b: Any) -> Any:
        def call(a: Any, b: Any) -> Any:
            return apply(a, b)

        return call if a == b == lanes_type else None


_overload(operator.add, "fadd")
_overload(operator.sub, "fsub")
_overload(operator.mul, "fmul")
_overload(operator.truediv, "fdiv")


@intrinsic
def _negate(typing: Any, a: Any) -> Any:
    return lanes_type(a), lambda context, builder, signature, args: builder.fneg(args[0])


@overload(operator.neg)
def _typed_negate(a: Any) -> Any:
    def call(a: Any) -> Any:
        return _negate(a)

    return call if a == lanes_type else None


@numba.njit(inline="always", error_model="numpy")
def sum_of_lanes(values: Any) -> np.float32:
    """Lanes added in order, from 0."""
    total = np.float32(0.0)
    for number in range(WIDTH):
        total = total + lane(values, number)
    return total


@numba.njit(inline="always", error_model="numpy")
def highest_of_lanes(values: Any) -> np.float32:
    """Largest lane; a NaN is passed over."""
    top = np.float32(-np.inf)
    for number in range(WIDTH):
        value = lane(values, number)
        top = value if value > top else top
    return top
