"""Bytes of weights, looked at and copied by compiled loops, in parts that stay in a cache.

Every byte of an update passes here several times, so a pass must not write what it finds to memory, as numpy does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.kernels.cpu.compiler import compiled

Bytes = npt.NDArray[np.uint8]
_INFINITY: dict[str, tuple[Any, int]] = {
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float32": (np.uint32, 0x7F800000),
    "float64": (np.uint64, 0x7FF0000000000000),
}
"""dtype -> (its bits as a number, those of infinity, which are those of NaN as well)"""
_BLOCK = 1 << 18
"""Bytes looked at together: one reader after the other finds them in the second-level cache."""
_NEAR = 1 << 16
"""Bytes that are written and read back while the first-level cache still holds much of them."""


def element_width(dtype: str) -> int:
    """Bytes of one element that may be NaN or infinite; 1 for every other dtype."""
    return np.dtype(_INFINITY[dtype][0]).itemsize if dtype in _INFINITY else 1


def all_finite(data: Bytes, dtype: str) -> bool:
    """Whether the elements [n] in these bytes hold neither NaN nor infinity; whole elements only."""
    if dtype not in _INFINITY or not data.size:
        return True
    unsigned, infinity = _INFINITY[dtype]
    words = data.view(unsigned)
    # What lies inside a message may begin at an odd address; compiled loops take whole words.
    return bool(_finite(words if words.flags.aligned else words.copy(), unsigned(infinity)))


def blocks_of(data: Bytes) -> Iterator[Bytes]:
    """The bytes [n] in parts that stay in a cache."""
    return (data[at : at + _BLOCK] for at in range(0, data.size, _BLOCK))


def same_bytes(one: Bytes, other: Bytes) -> bool:
    """Whether two arrays [n] hold the same bytes."""
    return one.size == other.size and bool(_same(one, other))


def copied(source: Bytes, target: Bytes, back: Bytes) -> bool:
    """Write ``source`` [n] into ``target`` [n]; whether ``back`` [n], another view of that memory, then holds it."""
    if not source.size == target.size == back.size:
        raise ValueError(f"{source.size}, {target.size} and {back.size} bytes are not as many")
    return bool(_copied(source, target, back))


@compiled
def _finite(words: Any, infinity: Any) -> Any:
    found = False
    for i in range(words.size):
        found |= (words[i] & infinity) == infinity
    return not found


@compiled
def _same(one: Any, other: Any) -> Any:
    differing = np.uint8(0)
    for i in range(one.size):
        differing |= one[i] ^ other[i]
    return differing == 0


@compiled
def _copied(source: Any, target: Any, back: Any) -> Any:
    differing = np.uint8(0)
    for start in range(0, source.size, _NEAR):
        # A slice, so that its indices are known to be positive: the loops become vectors.
        part, into, read = source[start : start + _NEAR], target[start : start + _NEAR], back[start : start + _NEAR]
        for i in range(part.size):
            into[i] = part[i]
        for i in range(part.size):
            differing |= read[i] ^ part[i]
    return differing == 0
