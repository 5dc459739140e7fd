"""Buckets of an update as bytes, without a copy of their tensors: the encoding of ``rollout.v1``, made and read here.

The generated classes copy the bytes of a tensor when they are set, when the message is serialized, when it is parsed
and at every look. A bucket is nearly all such bytes. So they are cut out: what is left of each chunk goes through the
generated class, and only the lengths around it are read and written here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from rollout.codec.fields import assign, extend, refuse_unknown_fields
from rollout.codec.tensor import dtype_to_proto
from rollout.codec.weights import chunk_from_proto, part_from_proto, update_from_proto
from rollout.errors import InvalidRequest
from rollout.types import TensorChunk, UpdateEnd, WeightUpdate
from rollout.v1 import rollout_pb2 as pb

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types; the others are groups, which proto3 does not have."""
_BUCKET = pb.UpdateWeightsRequest.BUCKET_FIELD_NUMBER << 3 | _BYTES
_CHUNK = pb.TensorBucket.CHUNKS_FIELD_NUMBER << 3 | _BYTES
_DATA = pb.TensorChunk.DATA_FIELD_NUMBER << 3 | _BYTES
_MOST_CHUNKS = 1 << 16
_MOST_FIELDS = 64
"""Of a chunk. Messages with more are left to the generated class: nobody sends such, and a loop here is slow."""
_MOST_LENGTH_BYTES = 5
_MOST_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class WireBucket:
    """A received bucket; equal to what the generated class would have made of the same bytes."""

    chunks: tuple[tuple[pb.TensorChunk, memoryview], ...]
    """each without its ``data``, and the data: a view of the received bytes"""
    size: int
    """bytes of the message"""


UpdateMessage = pb.UpdateWeightsRequest | WireBucket
"""A message of UpdateWeights as ``update_from_wire`` reads it."""


class _Odd(Exception):
    """The message is not laid out as every encoder lays out a bucket."""


def bucket_to_wire(chunks: Iterable[TensorChunk]) -> bytes:
    """A bucket as a serialized ``UpdateWeightsRequest``; each chunk's data, any buffer of bytes, is copied once.

    Raises:
        InvalidRequest: the wire has no such dtype, or a value does not fit its wire type.
    """
    parts: list[bytes | memoryview] = []
    size = 0
    for chunk in chunks:
        item = pb.TensorChunk(dtype=dtype_to_proto(chunk.dtype, f"{chunk.name}.dtype"))
        assign(item, f"{chunk.name}.", name=chunk.name, offset=chunk.offset)
        extend(item.shape, chunk.shape, f"{chunk.name}.shape")
        data = memoryview(chunk.data)
        # Data comes last, as its number is the highest; what is empty is left out.
        head = item.SerializeToString() + (bytes([_DATA]) + _length(len(data)) if len(data) else b"")
        front = bytes([_CHUNK]) + _length(len(head) + len(data)) + head
        parts += [front, data]
        size += len(front) + len(data)
    return b"".join([bytes([_BUCKET]) + _length(size), *parts])


def _length(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def update_from_wire(data: bytes) -> UpdateMessage:
    """A message of UpdateWeights. Whatever is no bucket in the usual layout goes to the generated class, whole.

    Raises:
        DecodeError: the bytes are no ``UpdateWeightsRequest``.
    """
    try:
        return WireBucket(_bucket(data), len(data))
    except (_Odd, DecodeError):
        return pb.UpdateWeightsRequest.FromString(data)


def message_bytes(message: UpdateMessage) -> int:
    """Its size on the wire."""
    return message.size if isinstance(message, WireBucket) else message.ByteSize()


def head_from_wire(message: UpdateMessage) -> WeightUpdate:
    """The first message of the stream.

    Raises:
        InvalidRequest: an unknown field, or a bucket; else as ``update_from_proto``.
    """
    if isinstance(message, WireBucket):
        raise InvalidRequest("the first message of UpdateWeights carries bucket; send begin first", field="begin")
    refuse_unknown_fields(message)
    return update_from_proto(message)


def part_from_wire(message: UpdateMessage) -> tuple[TensorChunk, ...] | UpdateEnd:
    """A later message of the stream: chunks, whose data may be views of the received bytes, or its end.

    Raises:
        InvalidRequest: an unknown field; else as ``part_from_proto``.
    """
    if not isinstance(message, WireBucket):
        refuse_unknown_fields(message)
        return part_from_proto(message)
    for i, (item, _) in enumerate(message.chunks):
        refuse_unknown_fields(item, f"bucket.chunks[{i}]")
    return tuple(chunk_from_proto(item, data, f"bucket.chunks[{i}]") for i, (item, data) in enumerate(message.chunks))


def _bucket(data: bytes) -> tuple[tuple[pb.TensorChunk, memoryview], ...]:
    at, end = _inside(data, 0, len(data), _BUCKET)
    if end != len(data):
        raise _Odd
    view, chunks = memoryview(data), []
    while at < end:
        start, at = _inside(data, at, end, _CHUNK)
        chunks.append(_chunk(view, data, start, at))
        if len(chunks) > _MOST_CHUNKS:
            raise _Odd
    return tuple(chunks)


def _chunk(view: memoryview, data: bytes, start: int, end: int) -> tuple[pb.TensorChunk, memoryview]:
    at, fields, found = start, 0, (start, start, start)
    while at < end:
        tag = data[at]
        if tag == _DATA:
            if found[2] > start:
                raise _Odd
            first, last = _inside(data, at, end, _DATA)
            found = (at, first, last)
            at = last
        else:
            at = _behind(data, at, end)
        fields += 1
        if fields > _MOST_FIELDS:
            raise _Odd
    cut, first, last = found
    # An element of a message may be cut out without a change to what the others say.
    return pb.TensorChunk.FromString(data[start:cut] + data[last:end]), view[first:last]


def _inside(data: bytes, at: int, end: int, tag: int) -> tuple[int, int]:
    """First and last byte + 1 of the field of bytes at ``at``, whose tag must be this one."""
    if at >= end or data[at] != tag:
        raise _Odd
    length, shift, at = 0, 0, at + 1
    for _ in range(_MOST_LENGTH_BYTES):
        if at >= end:
            raise _Odd
        byte = data[at]
        length |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            if at + length > end:
                raise _Odd
            return at, at + length
    raise _Odd


def _behind(data: bytes, at: int, end: int) -> int:
    """Where the field at ``at`` ends; one with a number below 16, whose tag is one byte."""
    tag = data[at]
    kind = tag & 7
    if not 1 << 3 <= tag < 0x80:
        raise _Odd
    if kind == _BYTES:
        return _inside(data, at, end, tag)[1]
    at += 1
    if kind == _VARINT:
        last = next((i for i in range(at, min(end, at + _MOST_VARINT_BYTES)) if data[i] < 0x80), end)
        at = last + 1
    elif kind == _FIXED32:
        at += 4
    elif kind == _FIXED64:
        at += 8
    else:
        raise _Odd
    if at > end:
        raise _Odd
    return at
