"""Tensors as little-endian bytes: bits survive, NaN payloads and -0.0 included."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rollout.codec.fields import malformed
from rollout.errors import InvalidRequest
from rollout.v1 import rollout_pb2 as pb

Scalar = TypeVar("Scalar", bound=np.generic)

DTYPES: dict[str, tuple[pb.Dtype.ValueType, int]] = {
    "float32": (pb.DTYPE_FLOAT32, 4),
    "bfloat16": (pb.DTYPE_BFLOAT16, 2),
    "float16": (pb.DTYPE_FLOAT16, 2),
    "float64": (pb.DTYPE_FLOAT64, 8),
    "int32": (pb.DTYPE_INT32, 4),
    "int64": (pb.DTYPE_INT64, 8),
    "uint64": (pb.DTYPE_UINT64, 8),
}
"""torch name without prefix -> (wire value, bytes per element)."""


def dtype_to_proto(name: str, field: str = "dtype") -> pb.Dtype.ValueType:
    """Wire value of a dtype name.

    Raises:
        InvalidRequest: the wire has no such dtype.
    """
    if name not in DTYPES:
        raise InvalidRequest(
            f"{field} = {name!r} has no wire type; supported: {', '.join(sorted(DTYPES))}", field=field
        )
    return DTYPES[name][0]


def dtype_from_proto(value: int, field: str = "dtype") -> str:
    """Name of a wire dtype.

    Raises:
        InvalidRequest: unset, or a number this version does not know.
    """
    for name, (known, _) in DTYPES.items():
        if known == value:
            return name
    raise InvalidRequest(f"{field} = {value} is no known Dtype; set one of {', '.join(sorted(DTYPES))}", field=field)


def tensor_to_proto(array: npt.NDArray[Any]) -> pb.Tensor:
    """A tensor of the array's own dtype; nothing is cast.

    Raises:
        InvalidRequest: the wire has no such dtype.
    """
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return pb.Tensor(dtype=dtype_to_proto(array.dtype.name), shape=array.shape, data=little.tobytes())


def tensor_from_proto(message: pb.Tensor, dtype: type[Scalar], field: str) -> npt.NDArray[Scalar]:
    """A writable array [shape] with the bits of the message.

    Raises:
        RolloutError: another dtype than asked for, a negative size, or bytes that do not fill the shape.
    """
    expected = np.dtype(dtype)
    if message.dtype != DTYPES[expected.name][0]:
        raise malformed(f"{field} has Dtype {message.dtype}, expected {expected.name}", field)
    shape = tuple(message.shape)
    size = expected.itemsize
    for length in shape:
        size *= length
    if min(shape, default=0) < 0 or size != len(message.data):
        raise malformed(
            f"{field} of shape {list(shape)} and dtype {expected.name} has {len(message.data)} bytes", field
        )
    little = np.frombuffer(message.data, dtype=expected.newbyteorder("<"))
    # A copy in native order: torch.from_numpy warns about views of read-only bytes.
    return little.astype(expected, copy=True).reshape(shape)


def vector_from_proto(message: pb.Tensor, dtype: type[Scalar], field: str) -> npt.NDArray[Scalar]:
    """``tensor_from_proto`` for one dimension [l]."""
    array = tensor_from_proto(message, dtype, field)
    if array.ndim != 1:
        raise malformed(f"{field} has {array.ndim} dimensions, expected 1", field)
    return array


def check_vector(array: npt.NDArray[Any], dtype: type[np.generic], length: int, field: str) -> None:
    """Refuse a vector whose dtype or length differs: C1, ids and log-probs agree in number, nothing is padded."""
    if array.dtype != np.dtype(dtype) or array.shape != (length,):
        raise malformed(
            f"{field} is {array.dtype.name}{list(array.shape)}, expected {np.dtype(dtype).name}[{length}]", field
        )
