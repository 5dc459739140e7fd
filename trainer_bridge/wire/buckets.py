"""Tensors to the messages of an UpdateWeights stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout import codec
from rollout.errors import InvalidRequest
from rollout.types import TensorChunk, UpdatePolicy, WeightUpdate
from rollout.v1 import rollout_pb2 as pb

DEFAULT_BUCKET_BYTES = 16 * 1024 * 1024

NamedTensor = tuple[str, Any]
"""Name and value: a numpy array or a torch tensor on any device."""


def plan_update(
    tensors: Sequence[NamedTensor], *, version: int, digest: str | None, policy: UpdatePolicy
) -> WeightUpdate:
    """Head of the update. Without a digest it is computed from the tensors' bytes.

    Raises:
        InvalidRequest: a name comes twice, or a dtype has no wire type.
    """
    names = [name for name, _ in tensors]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidRequest(f"tensors named twice: {', '.join(twice)}; send each parameter once", field="tensors")
    for name, value in tensors:
        dtype, _ = layout(value)
        if dtype not in codec.DTYPES:
            raise InvalidRequest(
                f"{name} is {dtype}; an update carries {', '.join(sorted(codec.DTYPES))}", field=f"tensors.{name}"
            )
    return WeightUpdate(
        version=version, digest=digest or _root_digest(tensors), num_tensors=len(tensors), policy=policy
    )


def _root_digest(tensors: Sequence[NamedTensor]) -> str:
    from rollout.weights import root_digest, tensor_digest

    root: str = root_digest(
        {name: tensor_digest(name, *layout(value), raw_bytes(value).data) for name, value in tensors}
    )
    return root


def update_messages(
    update: WeightUpdate, tensors: Sequence[NamedTensor], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[pb.UpdateWeightsRequest]:
    """The head, then buckets of at most ``bucket_bytes`` tensor bytes; a large tensor is split over several.

    Raises:
        InvalidRequest: ``bucket_bytes`` < 1.
    """
    if bucket_bytes < 1:
        raise InvalidRequest(f"bucket_bytes = {bucket_bytes} must be >= 1", field="bucket_bytes")
    return _messages(update, tensors, bucket_bytes)


def _messages(
    update: WeightUpdate, tensors: Sequence[NamedTensor], bucket_bytes: int
) -> Iterator[pb.UpdateWeightsRequest]:
    yield codec.update_to_proto(update)
    bucket: list[TensorChunk] = []
    room = bucket_bytes
    for name, value in tensors:
        dtype, shape = layout(value)
        data = raw_bytes(value)
        offset = 0
        # At least one chunk a tensor, so that one without elements arrives too.
        while offset < data.size or offset == 0:
            part = data[offset : offset + room].tobytes()
            bucket.append(TensorChunk(name=name, dtype=dtype, shape=shape, offset=offset, data=part))
            offset += len(part)
            room -= len(part)
            if room == 0:
                yield codec.bucket_to_proto(bucket)
                bucket, room = [], bucket_bytes
            if data.size == 0:
                break
    if bucket:
        yield codec.bucket_to_proto(bucket)


def layout(value: Any) -> tuple[str, tuple[int, ...]]:
    """Dtype name (torch's, without prefix) and shape."""
    dtype = value.dtype.name if isinstance(value, np.ndarray) else str(value.dtype).removeprefix("torch.")
    return dtype, tuple(int(size) for size in value.shape)


def raw_bytes(value: Any) -> npt.NDArray[np.uint8]:
    """Little-endian, C-order bytes [nbytes]; no copy where the value already lies so in host memory."""
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value).reshape(-1)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        return array.view(np.uint8)
    import torch

    flat: npt.NDArray[np.uint8] = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat
