"""Traces and parameters of the Debug service, both ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
import torch

from rollout.errors import InvalidRequest
from rollout.taps import ForwardPath, Trace, TraceRequest
from rollout.types import UInt64Array
from rollout.v1 import debug_pb2 as pb
from rollout.weights import dtype_name, tensor_bytes

_PART_BYTES = 8 << 20


def trace_request_to_proto(request: TraceRequest, replica: str = "") -> pb.TraceRequest:
    """The message of a request."""
    return pb.TraceRequest(
        token_ids=request.token_ids,
        positions=request.positions or (),
        logits_from=request.logits_from,
        path=request.path,
        decode_from=request.decode_from,
        company=[pb.TokenSequence(token_ids=ids) for ids in request.company],
        within=request.within,
        tensors=request.tensors,
        replica=replica,
        chunk=request.chunk,
    )


def trace_request_from_proto(message: pb.TraceRequest) -> TraceRequest:
    """The request of a message.

    Raises:
        InvalidRequest: an unknown path, or positions that do not match the ids.
    """
    if message.path not in get_args(ForwardPath):
        raise InvalidRequest(f"path = {message.path!r} is not one of {', '.join(get_args(ForwardPath))}", field="path")
    if message.positions and len(message.positions) != len(message.token_ids):
        raise InvalidRequest(
            f"{len(message.positions)} positions for {len(message.token_ids)} token ids", field="positions"
        )
    return TraceRequest(
        token_ids=tuple(message.token_ids),
        positions=tuple(message.positions) or None,
        logits_from=message.logits_from,
        path=message.path,  # type: ignore[arg-type]
        decode_from=message.decode_from if message.HasField("decode_from") else None,
        company=tuple(tuple(sequence.token_ids) for sequence in message.company),
        within=message.within if message.HasField("within") else None,
        tensors=tuple(message.tensors),
        chunk=message.chunk if message.HasField("chunk") else None,
    )


def trace_to_proto(trace: Trace) -> pb.TraceResponse:
    """The message of a trace."""
    return pb.TraceResponse(
        digests=[pb.TapDigests(tap=tap, rows=rows.tolist()) for tap, rows in trace.digests.items()],
        tensors=[
            pb.TapTensor(tap=tap, dtype=dtype_name(t.dtype), shape=t.shape, data=bytes(tensor_bytes(t)))
            for tap, t in trace.tensors.items()
        ],
    )


def trace_from_proto(message: pb.TraceResponse) -> Trace:
    """The trace of a message."""
    digests: dict[str, UInt64Array] = {d.tap: np.array(d.rows, np.uint64) for d in message.digests}
    return Trace(digests, {t.tap: tensor_from_bytes(t.dtype, t.shape, t.data) for t in message.tensors})


def tensor_from_bytes(dtype: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    """A tensor from its little-endian, C-order bytes."""
    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(tuple(shape)) if data else torch.empty(0, dtype=kind)


def tensor_parts(tensor: torch.Tensor) -> Iterator[pb.GetTensorResponse]:
    """A parameter as a stream of messages."""
    data = tensor_bytes(tensor)
    for start in range(0, max(len(data), 1), _PART_BYTES):
        part = bytes(data[start : start + _PART_BYTES])
        yield pb.GetTensorResponse(dtype=dtype_name(tensor.dtype), shape=tensor.shape, data=part)
