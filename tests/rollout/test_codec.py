"""Round trips by bits, requests judged on the way in, responses on the way out and in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import codec
from rollout.errors import InvalidRequest, RolloutError
from rollout.types import (
    Completion,
    FinishDetail,
    FinishReason,
    GenerateRequest,
    SampleSummary,
    SamplingParams,
    TokenChunk,
    VersionSpan,
)
from rollout.v1 import rollout_pb2 as pb

NAN_PAYLOAD = 0x7FC00DAD
BITS32 = st.lists(st.integers(0, 2**32 - 1), max_size=20)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.99),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    include_stop=st.booleans(),
    ignore_eos=st.booleans(),
    barred_token_ids=st.sets(st.integers(0, 2**31 - 1), max_size=3).map(lambda ids: tuple(sorted(ids))),
    bar_undefined_tokens=st.booleans(),
)


def encode(text: str) -> tuple[int, ...]:
    return tuple(text.strip().encode())


def floats(bits: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.asarray(bits, np.uint32).view(np.float32)


def chunk(length: int = 3, **changes: Any) -> TokenChunk:
    base = TokenChunk(
        sample_index=1,
        offset=4,
        token_ids=np.arange(length, dtype=np.int32),
        policy_logprobs=floats([0x80000000, NAN_PAYLOAD, 0xC0000001][:length]),
        behavior_logprobs=floats([1, 2, 3][:length]),
        weight_version=7,
        row_digests=np.asarray([2**64 - 1, 0, 5], np.uint64)[:length],
    )
    return replace(base, **changes)


def summary(**changes: Any) -> SampleSummary:
    base = SampleSummary(
        sample_index=1,
        num_tokens=5,
        finish=FinishDetail(FinishReason.STOP, stop_token_id=0, stop_string="x"),
        spans=(VersionSpan(1, 0, 2), VersionSpan(2, 2, 5)),
        text="",
        num_cached_tokens=3,
        replica="r",
    )
    return replace(base, **changes)


def completion(**changes: Any) -> Completion:
    base = Completion("id", (1, 2), SamplingParams(seed=0, max_tokens=5), (summary(),), "abc")
    return replace(base, **changes)


class TestTensor:
    @given(BITS32)
    def test_every_float32_keeps_its_bits(self, bits: list[int]) -> None:
        message = pb.Tensor.FromString(codec.tensor_to_proto(floats(bits)).SerializeToString())
        back = codec.tensor_from_proto(message, np.float32, "t")
        assert back.view(np.uint32).tolist() == bits
        assert back.dtype == np.float32
        assert back.flags.writeable

    def test_nan_payload_and_negative_zero_are_told_apart(self) -> None:
        a = codec.tensor_to_proto(floats([NAN_PAYLOAD, 0x80000000]))
        assert a != codec.tensor_to_proto(floats([0x7FC00000, 0x80000000])), "control: another payload"
        assert a != codec.tensor_to_proto(floats([NAN_PAYLOAD, 0])), "control: +0.0"

    def test_wire_is_little_endian_whatever_the_array_is(self) -> None:
        little = codec.tensor_to_proto(np.asarray([1, 2], "<i4"))
        assert little.data == bytes([1, 0, 0, 0, 2, 0, 0, 0])
        assert codec.tensor_to_proto(np.asarray([1, 2], ">i4")) == little

    def test_strided_arrays_are_laid_out_in_c_order(self) -> None:
        array = np.arange(6, dtype=np.int32).reshape(2, 3).T
        back = codec.tensor_from_proto(codec.tensor_to_proto(array), np.int32, "t")
        assert back.tolist() == array.tolist()

    @pytest.mark.parametrize(
        "message",
        [
            pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2], data=b"\0" * 7),
            pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2], data=b"\0" * 12),
            pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[-1, -2], data=b"\0" * 8),
            pb.Tensor(dtype=pb.DTYPE_INT32, shape=[2], data=b"\0" * 8),
            pb.Tensor(shape=[2], data=b"\0" * 8),
        ],
    )
    def test_shape_bytes_and_dtype_must_agree(self, message: pb.Tensor) -> None:
        with pytest.raises(RolloutError, match="malformed"):
            codec.tensor_from_proto(message, np.float32, "t")


class TestSampling:
    @given(SAMPLING)
    def test_round_trip(self, params: SamplingParams) -> None:
        message = pb.SamplingParams.FromString(codec.sampling_to_proto(params).SerializeToString())
        assert codec.sampling_from_proto(message) == params

    def test_unset_is_neutral_and_zero_is_zero(self) -> None:
        assert codec.sampling_from_proto(pb.SamplingParams()) == SamplingParams()
        zeros = codec.sampling_from_proto(pb.SamplingParams(temperature=0, seed=0, top_p=0))
        assert (zeros.temperature, zeros.seed, zeros.top_p) == (0.0, 0, 0.0)

    def test_top_k_minus_one_is_off(self) -> None:
        assert codec.sampling_from_proto(pb.SamplingParams(top_k=-1)).top_k == 0

    def test_a_seed_in_the_upper_half_is_the_same_seed(self) -> None:
        back = codec.sampling_from_proto(codec.sampling_to_proto(SamplingParams(seed=2**64 - 3)))
        assert back.seed is not None
        assert (back.seed - (2**64 - 3)) % 2**64 == 0

    @pytest.mark.parametrize(
        ("params", "field"),
        [
            (SamplingParams(seed=2**64), "sampling.seed"),
            (SamplingParams(top_k=2**31), "sampling.top_k"),
            (SamplingParams(max_tokens=2**31), "sampling.max_tokens"),
            (SamplingParams(stop=("\ud800",)), "sampling.stop"),
            (SamplingParams(stop_token_ids=(2**63,)), "sampling.stop_token_ids"),
        ],
    )
    def test_what_the_wire_cannot_hold_is_refused_by_name(self, params: SamplingParams, field: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            codec.sampling_to_proto(params)
        assert caught.value.field == field


class TestGenerateRequest:
    @given(IDS, SAMPLING, st.integers(1, 9), st.integers(0, 9), st.booleans())
    def test_round_trip(self, ids: list[int], params: SamplingParams, n: int, first: int, digests: bool) -> None:
        request = GenerateRequest("id", tuple(ids), params, n, first, digests)
        message = pb.GenerateRequest.FromString(codec.generate_request_to_proto(request).SerializeToString())
        back = codec.generate_request_from_proto(message, encode=encode)
        assert replace(back, sampling=params) == request
        assert back.sampling == replace(params, stop_token_ids=back.sampling.stop_token_ids)

    def test_text_goes_through_encode(self) -> None:
        request = GenerateRequest("", (), SamplingParams())
        message = codec.generate_request_to_proto(request, text="ab")
        assert codec.generate_request_from_proto(message, encode=encode).prompt_ids == (97, 98)

    def test_text_and_ids_are_one_too_many(self) -> None:
        with pytest.raises(InvalidRequest) as caught:
            codec.generate_request_to_proto(GenerateRequest("", (1,), SamplingParams()), text="ab")
        assert caught.value.field == "prompt"

    def test_unset_fields(self) -> None:
        message = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5]))
        request = codec.generate_request_from_proto(message, encode=encode)
        assert request == GenerateRequest("", (5,), SamplingParams(), n=1, sample_index=0, row_digests=False)

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"n": 0}, "n"),
            ({"n": -1}, "n"),
            ({"sample_index": -1}, "sample_index"),
            ({"sample_index": 2**31 - 1, "n": 2}, "sample_index"),
            ({"tokens": pb.TokenIds()}, "prompt.tokens.ids"),
            ({"tokens": pb.TokenIds(ids=[1, -1])}, "prompt.tokens.ids[1]"),
            ({"tokens": pb.TokenIds(ids=[2**31])}, "prompt.tokens.ids[0]"),
            ({"text": ""}, "prompt.text"),
            ({"text": "  "}, "prompt.text"),
            ({"tokens": None}, "prompt"),
        ],
    )
    def test_refused_by_name(self, changes: dict[str, Any], field: str) -> None:
        fields = {"tokens": pb.TokenIds(ids=[1])} if "text" not in changes else {}
        with pytest.raises(InvalidRequest) as caught:
            codec.generate_request_from_proto(pb.GenerateRequest(**(fields | changes)), encode=encode)
        assert caught.value.field == field

    @pytest.mark.parametrize(
        ("sampling", "field"),
        [
            ({"temperature": float("nan")}, "temperature"),
            ({"temperature": float("inf")}, "temperature"),
            ({"temperature": -0.5}, "temperature"),
            ({"top_p": 0.0}, "top_p"),
            ({"top_p": 1.5}, "top_p"),
            ({"top_p": float("nan")}, "top_p"),
            ({"min_p": 1.0}, "min_p"),
            ({"min_p": -0.1}, "min_p"),
            ({"top_k": -2}, "top_k"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": -3}, "max_tokens"),
            ({"stop": [""]}, "stop"),
            ({"stop_token_ids": [-1]}, "stop_token_ids"),
            ({"barred_token_ids": [2**31]}, "barred_token_ids"),
        ],
    )
    def test_sampling_is_judged(self, sampling: dict[str, Any], field: str) -> None:
        message = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1]), sampling=pb.SamplingParams(**sampling))
        with pytest.raises(InvalidRequest) as caught:
            codec.generate_request_from_proto(message, encode=encode)
        assert caught.value.field == f"sampling.{field}"


class TestGenerateEvents:
    def test_chunk_round_trip_by_bits(self) -> None:
        sent = chunk()
        message = pb.GenerateResponse.FromString(codec.generate_event_to_proto(sent).SerializeToString())
        back = codec.generate_event_from_proto(message)
        assert isinstance(back, TokenChunk)
        assert back.row_digests is not None
        assert sent.row_digests is not None
        assert (back.sample_index, back.offset, back.weight_version) == (1, 4, 7)
        assert back.token_ids.tobytes() == sent.token_ids.tobytes()
        assert back.policy_logprobs.tobytes() == sent.policy_logprobs.tobytes()
        assert back.behavior_logprobs.tobytes() == sent.behavior_logprobs.tobytes()
        assert back.row_digests.tobytes() == sent.row_digests.tobytes()

    def test_no_digests_stay_none(self) -> None:
        back = codec.generate_event_from_proto(codec.generate_event_to_proto(chunk(row_digests=None)))
        assert isinstance(back, TokenChunk)
        assert back.row_digests is None

    @pytest.mark.parametrize(
        "broken",
        [
            chunk(policy_logprobs=np.zeros(2, np.float32)),
            chunk(behavior_logprobs=np.zeros(4, np.float32)),
            chunk(row_digests=np.zeros(2, np.uint64)),
            chunk(token_ids=np.zeros(3, np.int64)),
            chunk(policy_logprobs=np.zeros(3, np.float64)),
            chunk(token_ids=np.zeros((3, 1), np.int32)),
            chunk(offset=-1),
        ],
    )
    def test_a_broken_chunk_never_leaves(self, broken: TokenChunk) -> None:
        """C3: ids and log-probs of unequal length; nothing is padded or cast."""
        with pytest.raises(RolloutError, match="malformed"):
            codec.generate_event_to_proto(broken)

    @pytest.mark.parametrize("name", ["token_ids", "policy_logprobs", "behavior_logprobs", "row_digests"])
    def test_a_broken_chunk_is_not_taken(self, name: str) -> None:
        """C6: 5 ids and 4 log-probs from another server."""
        message = codec.generate_event_to_proto(chunk())
        tensor = getattr(message.chunk, name)
        size = len(tensor.data) // 3
        tensor.data, tensor.shape[0] = tensor.data[:-size], 2
        with pytest.raises(RolloutError, match="malformed"):
            codec.generate_event_from_proto(message)

    @pytest.mark.parametrize("text", [None, "", "äß"])
    @pytest.mark.parametrize("reason", list(FinishReason))
    def test_summary_round_trip(self, reason: FinishReason, text: str | None) -> None:
        """K4: every reason arrives; text absent and empty are two things."""
        sent = summary(finish=FinishDetail(reason, None, None, "context", "why"), text=text)
        assert codec.generate_event_from_proto(codec.generate_event_to_proto(sent)) == sent
        assert codec.generate_event_from_proto(codec.generate_event_to_proto(summary())) == summary()

    @pytest.mark.parametrize("value", [0, 99])
    def test_finish_reason_must_be_known(self, value: int) -> None:
        message = codec.generate_event_to_proto(summary())
        message.summary.ClearField("finish_reason")
        message = pb.GenerateResponse.FromString(message.SerializeToString())
        if value:
            message.summary.MergeFromString(bytes([3 << 3, value]))
        with pytest.raises(RolloutError, match="finish_reason"):
            codec.generate_event_from_proto(message)

    @pytest.mark.parametrize(
        "spans",
        [
            (),
            (VersionSpan(1, 0, 4),),
            (VersionSpan(1, 0, 6),),
            (VersionSpan(1, 0, 2), VersionSpan(2, 3, 5)),
            (VersionSpan(1, 0, 3), VersionSpan(2, 2, 5)),
            (VersionSpan(1, 0, 5), VersionSpan(2, 5, 5)),
        ],
    )
    def test_spans_cover_once(self, spans: tuple[VersionSpan, ...]) -> None:
        with pytest.raises(RolloutError, match="spans"):
            codec.generate_event_to_proto(summary(spans=spans))

    def test_completion_round_trip(self) -> None:
        for sent in (completion(), completion(sampling=SamplingParams(temperature=0, seed=-1, max_tokens=1))):
            message = pb.GenerateResponse.FromString(codec.generate_event_to_proto(sent).SerializeToString())
            assert codec.generate_event_from_proto(message) == sent

    @pytest.mark.parametrize("sampling", [SamplingParams(seed=1), SamplingParams(max_tokens=1)])
    def test_completion_echoes_effective_values(self, sampling: SamplingParams) -> None:
        with pytest.raises(RolloutError, match="does not echo"):
            codec.generate_event_to_proto(completion(sampling=sampling))

    def test_mode_must_be_that_of_the_temperature(self) -> None:
        message = codec.generate_event_to_proto(completion())
        message.completion.logprob_mode = pb.LOGPROB_MODE_GREEDY_T1
        with pytest.raises(RolloutError, match="logprob_mode"):
            codec.generate_event_from_proto(message)

    def test_an_event_must_be_there(self) -> None:
        with pytest.raises(RolloutError, match="no event"):
            codec.generate_event_from_proto(pb.GenerateResponse())
