"""Score, UpdateWeights, Abort and unknown fields; ``test_codec`` has the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import codec
from rollout.codec.fields import assign
from rollout.errors import InvalidRequest, RolloutError
from rollout.types import (
    GenerateRequest,
    LogprobMode,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    ScoreSequence,
    SequenceScore,
    TensorChunk,
    UpdatePolicy,
    WeightState,
    WeightUpdate,
)
from rollout.v1 import rollout_pb2 as pb

BITS32 = st.lists(st.integers(0, 2**32 - 1), max_size=20)
UNKNOWN_99 = b"\x98\x06\x01"
"""Field 99, varint 1."""


def floats(bits: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.asarray(bits, np.uint32).view(np.float32)


class TestScore:
    def test_request_round_trip(self) -> None:
        request = ScoreRequest("s", (ScoreSequence((1, 2)), ScoreSequence((3, 4, 5), start=2)), 0.5, True)
        message = pb.ScoreRequest.FromString(codec.score_request_to_proto(request).SerializeToString())
        assert codec.score_request_from_proto(message) == request

    def test_unset_fields(self) -> None:
        message = pb.ScoreRequest(sequences=[pb.ScoreSequence(tokens=pb.TokenIds(ids=[1, 2]))])
        assert codec.score_request_from_proto(message) == ScoreRequest("", (ScoreSequence((1, 2), 1),), 1.0, False)

    @pytest.mark.parametrize(
        ("ids", "start", "temperature", "field"),
        [
            ([], 1, 1.0, "sequences[0].tokens.ids"),
            ([1], 1, 1.0, "sequences[0].tokens.ids"),
            ([1, -1], 1, 1.0, "sequences[0].tokens.ids[1]"),
            ([1, 2], 0, 1.0, "sequences[0].start"),
            ([1, 2], -1, 1.0, "sequences[0].start"),
            ([1, 2], 2, 1.0, "sequences[0].start"),
            ([1, 2], 1, -1.0, "temperature"),
            ([1, 2], 1, float("nan"), "temperature"),
        ],
    )
    def test_refused_by_name(self, ids: list[int], start: int, temperature: float, field: str) -> None:
        message = pb.ScoreRequest(
            sequences=[pb.ScoreSequence(tokens=pb.TokenIds(ids=ids), start=start)], temperature=temperature
        )
        with pytest.raises(InvalidRequest) as caught:
            codec.score_request_from_proto(message)
        assert caught.value.field == field

    def test_no_sequence(self) -> None:
        with pytest.raises(InvalidRequest) as caught:
            codec.score_request_from_proto(pb.ScoreRequest())
        assert caught.value.field == "sequences"

    @given(BITS32)
    def test_result_round_trip_by_bits(self, bits: list[int]) -> None:
        digests = np.asarray(bits, np.uint64) << np.uint64(32)
        sent = ScoreResult("s", (SequenceScore(floats(bits), digests),), 0.5, LogprobMode.TEMPERED, 3, "d")
        message = pb.ScoreResponse.FromString(codec.score_result_to_proto(sent).SerializeToString())
        back = codec.score_result_from_proto(message)
        assert replace(back, scores=()) == replace(sent, scores=())
        assert back.scores[0].logprobs.view(np.uint32).tolist() == bits
        assert back.scores[0].row_digests is not None
        assert back.scores[0].row_digests.tolist() == digests.tolist()

    def test_result_lengths_agree(self) -> None:
        score = SequenceScore(np.zeros(3, np.float32), np.zeros(2, np.uint64))
        with pytest.raises(RolloutError, match="malformed"):
            codec.score_result_to_proto(ScoreResult("s", (score,), 1.0, LogprobMode.TEMPERED, 3, "d"))


class TestWeights:
    @pytest.mark.parametrize("policy", list(UpdatePolicy))
    def test_head_round_trip(self, policy: UpdatePolicy) -> None:
        update = WeightUpdate(2**62, "ab01", 3, policy)
        assert codec.update_from_proto(codec.update_to_proto(update)) == update

    def test_unset_policy_is_wait(self) -> None:
        begin = pb.BeginUpdate(version=1, digest="ab", num_tensors=1)
        assert codec.update_from_proto(pb.UpdateWeightsRequest(begin=begin)).policy is UpdatePolicy.WAIT

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"version": 0}, "begin.version"),
            ({"version": -1}, "begin.version"),
            ({"folder": ""}, "begin.folder"),
            ({"transfer": ""}, "begin.transfer"),
            ({"digest": "xyz"}, "begin.digest"),
            ({"num_tensors": 0}, "begin.num_tensors"),
        ],
    )
    def test_head_refused_by_name(self, changes: dict[str, Any], field: str) -> None:
        fields: dict[str, Any] = {"version": 1, "digest": "ab", "num_tensors": 1}
        begin = pb.BeginUpdate(**(fields | changes))
        with pytest.raises(InvalidRequest) as caught:
            codec.update_from_proto(pb.UpdateWeightsRequest(begin=begin))
        assert caught.value.field == field

    def test_unknown_policy(self) -> None:
        message = codec.update_to_proto(WeightUpdate(1, "ab", 1))
        message.begin.MergeFromString(bytes([4 << 3, 9]))
        with pytest.raises(InvalidRequest, match=r"begin\.policy = 9"):
            codec.update_from_proto(message)

    @pytest.mark.parametrize("dtype", sorted(codec.DTYPES))
    def test_bucket_round_trip(self, dtype: str) -> None:
        size = codec.DTYPES[dtype][1]
        chunks = (
            TensorChunk("a", dtype, (2, 3), 0, bytes(range(3 * size))),
            TensorChunk("a", dtype, (2, 3), 3 * size, bytes(3 * size)),
            TensorChunk("scalar", dtype, (), 0, bytes(size)),
            TensorChunk("empty", dtype, (0, 4), 0, b""),
        )
        message = pb.UpdateWeightsRequest.FromString(codec.bucket_to_wire(chunks))
        assert codec.bucket_from_proto(message) == chunks

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"name": ""}, "name"),
            ({"dtype": pb.DTYPE_UNSPECIFIED}, "dtype"),
            ({"shape": [-2, -1]}, "shape"),
            ({"offset": -1}, "data"),
            ({"offset": 5}, "data"),
            ({"data": b"\0" * 9}, "data"),
            ({"data": b""}, "data"),
        ],
    )
    def test_bucket_refused_by_name(self, changes: dict[str, Any], field: str) -> None:
        fields: dict[str, Any] = {"name": "a", "dtype": pb.DTYPE_FLOAT32, "shape": [2], "data": b"\0" * 4}
        bucket = pb.TensorBucket(chunks=[pb.TensorChunk(**(fields | changes))])
        with pytest.raises(InvalidRequest) as caught:
            codec.bucket_from_proto(pb.UpdateWeightsRequest(bucket=bucket))
        assert caught.value.field == f"bucket.chunks[0].{field}"

    def test_parts_in_the_wrong_order(self) -> None:
        begin = codec.update_to_proto(WeightUpdate(1, "ab", 1))
        bucket = pb.UpdateWeightsRequest(bucket=pb.TensorBucket())
        for message in (bucket, pb.UpdateWeightsRequest()):
            with pytest.raises(InvalidRequest, match="send begin first"):
                codec.update_from_proto(message)
        for message in (begin, pb.UpdateWeightsRequest()):
            with pytest.raises(InvalidRequest, match="only buckets after begin"):
                codec.bucket_from_proto(message)

    def test_unknown_dtype_on_the_way_out(self) -> None:
        with pytest.raises(InvalidRequest, match="float8_e4m3fn"):
            codec.bucket_to_wire([TensorChunk("a", "float8_e4m3fn", (1,), 0, b"\0")])

    def test_state_round_trip(self) -> None:
        assert codec.weights_from_proto(codec.weights_to_proto(WeightState(5, "ff"))) == WeightState(5, "ff")


class TestAbort:
    def test_one_or_all(self) -> None:
        assert codec.abort_from_proto(pb.AbortRequest(request_id="a")) == "a"
        assert codec.abort_from_proto(pb.AbortRequest(all=True)) == ""

    @pytest.mark.parametrize("message", [pb.AbortRequest(), pb.AbortRequest(request_id="a", all=True)])
    def test_neither_or_both(self, message: pb.AbortRequest) -> None:
        with pytest.raises(InvalidRequest) as caught:
            codec.abort_from_proto(message)
        assert caught.value.field == "request_id"


class TestUnknownFields:
    def requests(self) -> list[tuple[Any, Any, str]]:
        generate = codec.generate_request_to_proto(GenerateRequest("a", (1,), SamplingParams()))
        score = codec.score_request_to_proto(ScoreRequest("a", (ScoreSequence((1, 2)), ScoreSequence((1, 2)))))
        wire = codec.bucket_to_wire([TensorChunk("a", "int32", (1,), 0, b"\0" * 4)])
        bucket = pb.UpdateWeightsRequest.FromString(wire)
        begin = codec.update_to_proto(WeightUpdate(1, "ab", 1))
        return [
            (generate, generate, "rollout.v1.GenerateRequest"),
            (generate, generate.sampling, "rollout.v1.SamplingParams"),
            (generate, generate.tokens, "rollout.v1.TokenIds"),
            (score, score.sequences[1], "rollout.v1.ScoreSequence"),
            (score, score.sequences[1].tokens, "rollout.v1.TokenIds"),
            (begin, begin.begin, "rollout.v1.BeginUpdate"),
            (bucket, bucket.bucket, "rollout.v1.TensorBucket"),
            (bucket, bucket.bucket.chunks[0], "rollout.v1.TensorChunk"),
            (pb.PauseRequest(), None, "rollout.v1.PauseRequest"),
        ]

    def test_refused_at_any_depth_by_type_and_number(self) -> None:
        for message, part, name in self.requests():
            codec.refuse_unknown_fields(message)
            (message if part is None else part).MergeFromString(UNKNOWN_99)
            received = type(message).FromString(message.SerializeToString())
            with pytest.raises(InvalidRequest, match=f"{name} has a field with number 99"):
                codec.refuse_unknown_fields(received)
            (message if part is None else part).DiscardUnknownFields()

    def test_the_path_is_the_field(self) -> None:
        message = codec.score_request_to_proto(ScoreRequest("a", (ScoreSequence((1, 2)), ScoreSequence((1, 2)))))
        message.sequences[1].tokens.MergeFromString(UNKNOWN_99)
        with pytest.raises(InvalidRequest) as caught:
            codec.refuse_unknown_fields(message)
        assert caught.value.field == "sequences[1].tokens.99"

    def test_a_known_number_of_another_wire_type_is_unknown(self) -> None:
        message = pb.SamplingParams.FromString(bytes([1 << 3, 1]))
        assert not message.HasField("temperature"), "protobuf alone would ignore it"
        with pytest.raises(InvalidRequest, match="number 1 "):
            codec.refuse_unknown_fields(message)

    def test_maps_are_searched(self) -> None:
        info = pb.GetServerInfoResponse(manifest={"a": "b"}, weights=pb.WeightState(version=1))
        codec.refuse_unknown_fields(info)
        info.weights.MergeFromString(UNKNOWN_99)
        with pytest.raises(InvalidRequest):
            codec.refuse_unknown_fields(info)


def test_assign_leaves_none_unset() -> None:
    message = pb.SamplingParams()
    assign(message, seed=None, top_k=0)
    assert not message.HasField("seed")
    assert message.HasField("top_k")
