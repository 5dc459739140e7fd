"""UpdateWeights: the head, the buckets, the end, and the state that is served."""

from __future__ import annotations

import re
from math import prod

from rollout.codec.fields import assign
from rollout.codec.tensor import DTYPES, dtype_from_proto
from rollout.errors import InvalidRequest
from rollout.types import TensorChunk, UpdateEnd, UpdatePolicy, WeightState, WeightUpdate
from rollout.v1 import rollout_pb2 as pb

_POLICIES = {
    UpdatePolicy.WAIT: pb.UPDATE_POLICY_WAIT,
    UpdatePolicy.ABORT: pb.UPDATE_POLICY_ABORT,
    UpdatePolicy.RECOMPUTE: pb.UPDATE_POLICY_RECOMPUTE,
}
_HEX = re.compile(r"[0-9a-f]+")


def update_to_proto(update: WeightUpdate) -> pb.UpdateWeightsRequest:
    """First message of the stream.

    Raises:
        InvalidRequest: a value does not fit its wire type.
    """
    begin = pb.BeginUpdate(policy=_POLICIES[update.policy], allow_nonfinite=update.allow_nonfinite)
    assign(begin, "begin.", version=update.version, digest=update.digest, num_tensors=update.num_tensors)
    assign(begin, "begin.", folder=update.folder or None, transfer=update.transfer or None)
    return pb.UpdateWeightsRequest(begin=begin)


def end_to_proto(end: UpdateEnd) -> pb.UpdateWeightsRequest:
    """Last message of a stream whose head has no digest."""
    return pb.UpdateWeightsRequest(end=pb.EndUpdate(digest=end.digest))


def update_from_proto(message: pb.UpdateWeightsRequest) -> WeightUpdate:
    """The head of an update. An unset policy is WAIT, as the protocol says.

    Raises:
        InvalidRequest: the stream does not start with ``begin``, or a value in it is unset or out of range.
    """
    if message.WhichOneof("part") != "begin":
        raise InvalidRequest(
            f"the first message of UpdateWeights carries {message.WhichOneof('part') or 'nothing'}; send begin first",
            field="begin",
        )
    begin = message.begin
    if begin.version < 1:
        raise InvalidRequest(f"begin.version = {begin.version} must be >= 1", field="begin.version")
    if begin.digest:
        _check_digest(begin.digest, "begin.digest")
    if begin.num_tensors < 1:
        raise InvalidRequest(
            f"begin.num_tensors = {begin.num_tensors} must be >= 1: an update holds every parameter",
            field="begin.num_tensors",
        )
    source = begin.WhichOneof("source")
    if source is not None and not getattr(begin, source):
        raise InvalidRequest(f"begin.{source} is empty; leave it out to send buckets", field=f"begin.{source}")
    return WeightUpdate(
        version=begin.version,
        digest=begin.digest,
        num_tensors=begin.num_tensors,
        policy=_policy(begin.policy),
        allow_nonfinite=begin.allow_nonfinite,
        folder=begin.folder,
        transfer=begin.transfer,
    )


def _check_digest(digest: str, field: str) -> None:
    if not _HEX.fullmatch(digest):
        raise InvalidRequest(
            f"{field} = {digest[:80]!r} is no lower-case hex digest; send rollout.weights.root_digest", field=field
        )


def _policy(value: int) -> UpdatePolicy:
    if value == pb.UPDATE_POLICY_UNSPECIFIED:
        return UpdatePolicy.WAIT
    for policy, known in _POLICIES.items():
        if known == value:
            return policy
    raise InvalidRequest(
        f"begin.policy = {value} is no known UpdatePolicy; set WAIT, ABORT or RECOMPUTE", field="begin.policy"
    )


def part_from_proto(message: pb.UpdateWeightsRequest) -> tuple[TensorChunk, ...] | UpdateEnd:
    """A later message of the stream: chunks, or its end.

    Raises:
        InvalidRequest: see ``bucket_from_proto``; or an end without a digest.
    """
    if message.WhichOneof("part") != "end":
        return bucket_from_proto(message)
    _check_digest(message.end.digest, "end.digest")
    return UpdateEnd(message.end.digest)


def bucket_from_proto(message: pb.UpdateWeightsRequest) -> tuple[TensorChunk, ...]:
    """Chunks of a later message; whether they cover every tensor once is checked where they are staged.

    Raises:
        InvalidRequest: no bucket, an unknown dtype, or bytes outside the tensor.
    """
    if message.WhichOneof("part") != "bucket":
        raise InvalidRequest(
            f"a later message of UpdateWeights carries {message.WhichOneof('part') or 'nothing'}; "
            "send only buckets after begin",
            field="bucket",
        )
    return tuple(
        chunk_from_proto(item, item.data, f"bucket.chunks[{i}]") for i, item in enumerate(message.bucket.chunks)
    )


def chunk_from_proto(message: pb.TensorChunk, data: bytes | memoryview, field: str) -> TensorChunk:
    """A chunk whose bytes are ``data``, whatever the message holds of them.

    Raises:
        InvalidRequest: no name, an unknown dtype, or bytes outside the tensor.
    """
    if not message.name:
        raise InvalidRequest(f"{field}.name is empty; name the parameter as in the checkpoint", field=f"{field}.name")
    dtype = dtype_from_proto(message.dtype, f"{field}.dtype")
    shape = tuple(message.shape)
    if min(shape, default=0) < 0:
        raise InvalidRequest(f"{field}.shape = {list(shape)} of {message.name} is negative", field=f"{field}.shape")
    size = prod(shape) * DTYPES[dtype][1]
    end = message.offset + len(data)
    if message.offset < 0 or end > size:
        raise InvalidRequest(
            f"{field} holds bytes [{message.offset}, {end}) of {message.name}, which has {size} "
            f"({dtype} {list(shape)})",
            field=f"{field}.data",
        )
    if not len(data) and size:
        raise InvalidRequest(
            f"{field} holds no bytes of {message.name}, which has {size}; leave such a chunk out", field=f"{field}.data"
        )
    return TensorChunk(name=message.name, dtype=dtype, shape=shape, offset=message.offset, data=data)


def weights_to_proto(state: WeightState) -> pb.WeightState:
    """What is served, on the wire."""
    return pb.WeightState(version=state.version, digest=state.digest)


def weights_from_proto(message: pb.WeightState) -> WeightState:
    """What is served."""
    return WeightState(version=message.version, digest=message.digest)
