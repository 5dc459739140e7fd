"""Alternatives, prompt log-probs, priority and counts on the wire: every bit both ways, and nothing out of shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rollout import codec
from rollout.errors import InvalidRequest, RolloutError
from rollout.types import (
    GenerateRequest,
    LogprobMode,
    PromptChunk,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    ScoreSequence,
    SequenceScore,
    TokenChunk,
    TopLogprobs,
)

BITS = np.array([[0x80000001, 0xBF800000], [0xFF800000, 0xC0490FDB], [0x80000000, 0xB3800001]], np.uint32)
TOP = TopLogprobs(np.array([[5, 0], [2**31 - 1, 7], [3, 2]], np.int32), BITS.view(np.float32))
VALUES = np.array([-1, -2, -3], np.float32)
DIGESTS = np.array([1, 2, 2**64 - 1], np.uint64)


def chunk(top: TopLogprobs | None = TOP) -> TokenChunk:
    return TokenChunk(1, 4, np.array([5, 6, 7], np.int32), VALUES, VALUES, 2, DIGESTS, top)


def prompt(top: TopLogprobs | None = TOP) -> PromptChunk:
    return PromptChunk(9, VALUES, 2, DIGESTS, top)


def same_top(one: TopLogprobs | None, other: TopLogprobs | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.token_ids.tobytes() == other.token_ids.tobytes() and one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.parametrize("top", [TOP, None])
def test_events_keep_every_bit(top: TopLogprobs | None) -> None:
    for event in (chunk(top), prompt(top)):
        again = codec.generate_event_from_proto(codec.generate_event_to_proto(event))
        assert isinstance(again, type(event)) and same_top(again.top, top)
        assert again.row_digests is not None and again.row_digests.tolist() == DIGESTS.tolist()
        assert again.weight_version == 2
        if isinstance(again, PromptChunk):
            assert again.start == 9 and again.logprobs.tobytes() == VALUES.tobytes()


@pytest.mark.parametrize("top", [TOP, None])
def test_scores_keep_every_bit(top: TopLogprobs | None) -> None:
    result = ScoreResult("x", (SequenceScore(VALUES, DIGESTS, top),), 1.0, LogprobMode.TEMPERED, 3, "aa")
    (score,) = codec.score_result_from_proto(codec.score_result_to_proto(result)).scores
    assert same_top(score.top, top) and score.logprobs.tobytes() == VALUES.tobytes()


BAD_TOPS: dict[str, dict[str, Any]] = {
    "fewer rows": {"token_ids": TOP.token_ids[:2], "logprobs": TOP.logprobs[:2]},
    "two widths": {"token_ids": TOP.token_ids[:, :1]},
    "flat": {"token_ids": TOP.token_ids[:, 0], "logprobs": TOP.logprobs[:, 0]},
    "no alternative": {"token_ids": TOP.token_ids[:, :0], "logprobs": TOP.logprobs[:, :0]},
    "another dtype": {"token_ids": TOP.token_ids.astype(np.int64)},
}


@pytest.mark.parametrize("fault", BAD_TOPS)
@pytest.mark.parametrize("make", [chunk, prompt])
def test_alternatives_out_of_shape_are_refused(make: Any, fault: str) -> None:
    bad = dataclasses.replace(TOP, **BAD_TOPS[fault])
    with pytest.raises(RolloutError, match="top"):
        codec.generate_event_to_proto(make(bad))
    with pytest.raises(RolloutError, match="top"):
        result = ScoreResult("x", (SequenceScore(VALUES, None, bad),), 1.0, LogprobMode.TEMPERED, 3, "aa")
        codec.score_result_to_proto(result)


def test_a_prompt_starts_at_position_one() -> None:
    with pytest.raises(RolloutError, match="position 0 has none"):
        codec.generate_event_to_proto(dataclasses.replace(prompt(), start=0))


@pytest.mark.parametrize("fields", [{}, {"priority": -3, "top_logprobs": 5, "prompt_logprobs": True}])
def test_requests_keep_what_was_asked(fields: dict[str, Any]) -> None:
    request = GenerateRequest("x", (3, 4), SamplingParams(seed=1, max_tokens=2), **fields)
    message = codec.generate_request_to_proto(request)
    assert codec.generate_request_from_proto(message, encode=lambda text: ()) == request
    assert "client" not in {f.name for f in message.DESCRIPTOR.fields}, "the service says who it is, not the request"
    fields.pop("prompt_logprobs", None)
    score = ScoreRequest("x", (ScoreSequence((3, 4)),), **fields)
    assert codec.score_request_from_proto(codec.score_request_to_proto(score)) == score


def test_negative_counts_are_refused() -> None:
    request = GenerateRequest("x", (3, 4), SamplingParams(), top_logprobs=-1)
    score = ScoreRequest("x", (ScoreSequence((3, 4)),), top_logprobs=-1)
    for check in (
        lambda: codec.generate_request_from_proto(codec.generate_request_to_proto(request), encode=lambda text: ()),
        lambda: codec.score_request_from_proto(codec.score_request_to_proto(score)),
    ):
        with pytest.raises(InvalidRequest, match="top_logprobs = -1 must be >= 0") as refused:
            check()
        assert refused.value.field == "top_logprobs"
