"""Token ids as callers hold them: lists, numpy arrays, torch tensors. None is rounded, parsed or cut to fit."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest
from rollout.types import Int32Array


def token_ids(values: Iterable[Any], field: str) -> tuple[int, ...]:
    """Ids [n] of a list, or of a one-dimensional array or tensor of integers.

    Raises:
        InvalidRequest: a number with a fraction, a truth value, text, or lists within the list.
    """
    if isinstance(values, str | bytes):
        raise InvalidRequest(f"{field} is {type(values).__name__}, must be a list of integers", field=field)
    try:
        items = list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError:
        raise InvalidRequest(f"{field} is {values!r:.60}, must be a list of integers", field=field) from None
    return tuple(item if type(item) is int else integer(item, f"{field}[{i}]", field) for i, item in enumerate(items))


def integer(item: Any, name: str, field: str) -> int:
    """A number as Python's own integer.

    Args:
        name: what the message calls it. field: of the error.

    Raises:
        InvalidRequest: as ``token_ids``.
    """
    shape: Any = getattr(item, "shape", ())
    try:
        if isinstance(item, bool) or shape:
            raise TypeError
        return operator.index(item)
    except TypeError:
        raise InvalidRequest(
            f"{name} is {item!r:.60}, must be an integer: nothing is rounded or parsed", field=field
        ) from None


def id_array(values: npt.ArrayLike, field: str) -> Int32Array:
    """Ids as int32 [n], at once for long rows.

    Raises:
        InvalidRequest: another type than integers, another shape, or a number that int32 does not hold.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidRequest(
            f"{field} is {array.dtype} {array.shape}, must be integers in one dimension: nothing is rounded",
            field=field,
        )
    limits = np.iinfo(np.int32)
    if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
        odd = next(int(item) for item in array if not limits.min <= int(item) <= limits.max)
        raise InvalidRequest(f"{field} holds {odd}, which is no token id: ids are int32", field=field)
    return array.astype(np.int32)
