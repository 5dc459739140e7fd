"""The hand-made encoding of buckets against the generated classes, both ways, on whatever bytes there are."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout import codec
from rollout.codec import weight_wire
from rollout.errors import InvalidRequest, RolloutError
from rollout.types import TensorChunk, UpdateEnd
from rollout.v1 import rollout_pb2 as pb

SIZES = st.sampled_from([0, 1, 7, 127, 128, 300, 16_383, 16_384])


@st.composite
def chunks(draw: Any) -> TensorChunk:
    """Any that fit the wire's types, sensible or not."""
    size = draw(SIZES)
    return TensorChunk(
        name=draw(st.text(st.characters(codec="utf-8"), max_size=5)),
        dtype=draw(st.sampled_from(sorted(codec.DTYPES))),
        shape=tuple(draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3))),
        offset=draw(st.sampled_from([0, 1, 2**40, -1])),
        data=bytes(draw(st.binary(min_size=min(size, 3), max_size=3)) * (size // 3) or bytes(size)),
    )


def generated(some: list[TensorChunk]) -> pb.UpdateWeightsRequest:
    """The same bucket by the generated class alone."""
    items = [
        pb.TensorChunk(name=c.name, dtype=codec.DTYPES[c.dtype][0], shape=c.shape, offset=c.offset, data=bytes(c.data))
        for c in some
    ]
    return pb.UpdateWeightsRequest(bucket=pb.TensorBucket(chunks=items))


def whole(bucket: codec.WireBucket) -> pb.UpdateWeightsRequest:
    """A received bucket with its data put back."""
    items = []
    for item, data in bucket.chunks:
        assert not item.data
        copy = pb.TensorChunk.FromString(item.SerializeToString())
        copy.data = bytes(data)
        items.append(copy)
    return pb.UpdateWeightsRequest(bucket=pb.TensorBucket(chunks=items))


def outcome(read: Any, data: bytes) -> Any:
    """What a reader makes of the bytes, or how it refuses them."""
    try:
        part = read(data)
    except (DecodeError, RolloutError) as error:
        return type(error), getattr(error, "field", "")
    return part if isinstance(part, UpdateEnd) else [(c.name, c.dtype, c.shape, c.offset, bytes(c.data)) for c in part]


def by_generated_class(data: bytes) -> Any:
    message = pb.UpdateWeightsRequest.FromString(data)
    codec.refuse_unknown_fields(message)
    return codec.part_from_proto(message)


def by_hand(data: bytes) -> Any:
    return codec.part_from_wire(codec.update_from_wire(data))


@given(st.lists(chunks(), max_size=4))
def test_what_is_sent_is_the_generated_encoding(some: list[TensorChunk]) -> None:
    assert codec.bucket_to_wire(some) == generated(some).SerializeToString()


@given(st.lists(chunks(), max_size=4))
def test_a_received_bucket_is_what_was_sent_and_copies_nothing(some: list[TensorChunk]) -> None:
    data = generated(some).SerializeToString()
    received = codec.update_from_wire(data)
    assert isinstance(received, codec.WireBucket)
    assert whole(received) == generated(some)
    assert codec.message_bytes(received) == len(data) == generated(some).ByteSize()
    assert all(view.obj is data and view.readonly for _, view in received.chunks)


FIELD = st.sampled_from(
    [
        b"\x0a\x01a", b"\x0a\x02\xff\xff", b"\x10\x02", b"\x10\x82\x00", b"\x1a\x01\x02", b"\x18\x02", b"\x20\x00",
        b"\x2a\x04abcd", b"\x2a\x84\x80\x00abcd", b"\x2a\x00", b"\x28\x01", b"\x98\x06\x01", b"\x30\x01",
        b"\x3d\0\0\0\0",        b"\x39\0\0\0\0\0\0\0\0", b"\x33\x34", b"\x07", b"\x00\x00",
        b"\x2a\xff\xff\xff\xff\x7f", b"\x2a\x05abcd",
        b"\x20" + b"\xff" * 10, b"\x20" + b"\x80" * 9 + b"\x01", b"\x82\x80\x00\x01a",
    ]
)  # fmt: skip


def framed(tag: int, body: bytes) -> bytes:
    return bytes([tag]) + weight_wire._length(len(body)) + body


@st.composite
def oddities(draw: Any) -> bytes:
    """Right frames around fields that are right, odd, unknown or broken; frames repeated, mixed with others."""
    bodies = draw(st.lists(st.lists(FIELD, max_size=6), max_size=3))
    bucket = b"".join(framed(0x0A, b"".join(fields)) for fields in bodies)
    message = framed(0x12, bucket + draw(st.sampled_from([b"", b"\x12\x00", b"\x98\x06\x01", b"\x0a"])))
    others = st.sampled_from([b"", b"", b"", message, b"\x1a\x04\x0a\x02ab", b"\x0a\x02\x08\x01", b"\x20\x01", b"\x80"])
    return bytes(draw(others)) + message + bytes(draw(others))


@settings(max_examples=1000)
@given(oddities())
@example(framed(0x12, framed(0x0A, b"\x0a\x01a\x10\x02\x2a\x04abcd\x18\x01")))
def test_every_message_means_what_the_generated_class_says(data: bytes) -> None:
    assert outcome(by_hand, data) == outcome(by_generated_class, data)


@settings(max_examples=1000)
@given(st.lists(chunks(), min_size=1, max_size=3), st.data())
def test_damaged_messages_mean_the_same_too(some: list[TensorChunk], drawn: st.DataObject) -> None:
    data = bytearray(codec.bucket_to_wire(some))
    at = drawn.draw(st.integers(0, min(len(data) - 1, 60)))
    kind = drawn.draw(st.sampled_from(["change", "cut", "insert", "drop"]))
    if kind == "cut":
        del data[at:]
    elif kind == "drop":
        del data[at]
    else:
        data[at : at + (kind == "change")] = bytes([drawn.draw(st.integers(0, 255))])
    assert outcome(by_hand, bytes(data)) == outcome(by_generated_class, bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(framed(0x12, b"\x0a\x00" * 70_000), id="chunks without end"),
        pytest.param(framed(0x12, framed(0x0A, b"\x20\x01" * 70_000)), id="fields without end"),
        pytest.param(framed(0x12, framed(0x0A, b"\x2a\x01a" * 2)), id="data twice"),
        pytest.param(framed(0x12, b"") * 2, id="two buckets"),
    ],
)
def test_what_nobody_sends_is_left_to_the_generated_class(data: bytes) -> None:
    assert isinstance(codec.update_from_wire(data), pb.UpdateWeightsRequest)
    assert outcome(by_hand, data) == outcome(by_generated_class, data)


def test_a_view_of_wrong_bytes_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a reader that is one byte off."""
    data = codec.bucket_to_wire([TensorChunk("a", "int32", (1,), 0, b"abcd")])
    real = weight_wire._inside

    def off(data: bytes, at: int, end: int, tag: int) -> tuple[int, int]:
        first, last = real(data, at, end, tag)
        return (first - 1, last) if tag == 0x2A else (first, last)

    monkeypatch.setattr(weight_wire, "_inside", off)
    assert outcome(by_hand, data) != outcome(by_generated_class, data)


def test_a_bucket_is_no_head() -> None:
    bucket = codec.update_from_wire(codec.bucket_to_wire([TensorChunk("a", "int32", (1,), 0, b"abcd")]))
    with pytest.raises(InvalidRequest, match="send begin first"):
        codec.head_from_wire(bucket)
