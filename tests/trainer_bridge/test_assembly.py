"""Streams put together again: every breach of conservation is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout.codec import GenerateEvent
from rollout.errors import (
    ParityError,
)
from rollout.types import (
    Completion,
    GenerateRequest,
    LogprobMode,
    SampleSummary,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    ScoreSequence,
    SequenceScore,
    TokenChunk,
    VersionSpan,
)
from tests.fakes.backend import FakeBackend
from trainer_bridge.wire import Assembler, check_scores
from trainer_bridge.wire.echo import echo_difference

SAMPLING = SamplingParams(seed=3, max_tokens=10)
REQUEST = GenerateRequest("x", (5, 6), SAMPLING, n=2, sample_index=1, row_digests=True)


async def events_of(request: GenerateRequest) -> list[GenerateEvent]:
    return [event async for event in FakeBackend().generate(request)]


def chunks(events: list[GenerateEvent]) -> list[int]:
    return [i for i, event in enumerate(events) if isinstance(event, TokenChunk)]


def edit(kind: type[Any], which: int, **changes: Any) -> Callable[[list[GenerateEvent]], None]:
    def change(events: list[GenerateEvent]) -> None:
        at = [i for i, event in enumerate(events) if isinstance(event, kind)][which]
        events[at] = replace(events[at], **changes)

    return change


def swap(events: list[GenerateEvent], a: int, b: int) -> None:
    events[a], events[b] = events[b], events[a]


def infinite(events: list[GenerateEvent]) -> None:
    first = events[0]
    assert isinstance(first, TokenChunk)
    values = first.policy_logprobs.copy()
    values[1] = np.nan
    events[0] = replace(first, policy_logprobs=values)


def shorter(events: list[GenerateEvent]) -> None:
    first = events[0]
    assert isinstance(first, TokenChunk)
    events[0] = replace(first, policy_logprobs=first.policy_logprobs[:-1])


def relabelled_summary(events: list[GenerateEvent]) -> None:
    edit(SampleSummary, 0, spans=(VersionSpan(2, 0, 10),))(events)


BROKEN: dict[str, Callable[[list[GenerateEvent]], Any]] = {
    "chunk lost": lambda events: events.pop(2),
    "last chunk lost": lambda events: events.pop(chunks(events)[-1]),
    "chunk repeated": lambda events: events.insert(1, events[0]),
    "chunks swapped": lambda events: swap(events, 0, 2),
    "chunk of a stranger": edit(TokenChunk, 0, sample_index=9),
    "chunk of the sibling": edit(TokenChunk, 0, sample_index=2),
    "chunk after the end": lambda events: events.insert(-1, events.pop(chunks(events)[-1])),
    "5 ids and 4 log-probs": shorter,
    "log-prob not finite": infinite,
    "digests missing": edit(TokenChunk, 0, row_digests=None),
    "version relabelled in a chunk": edit(TokenChunk, 0, weight_version=2),
    "version relabelled in the summary": relabelled_summary,
    "count wrong": edit(SampleSummary, 0, num_tokens=9),
    "summary lost": lambda events: events.pop(-2),
    "summary repeated": lambda events: events.insert(-1, events[-2]),
    "completion lost": lambda events: events.pop(),
    "completion repeated": lambda events: events.append(events[-1]),
    "completion first": lambda events: events.insert(0, events.pop()),
    "completion of fewer samples": edit(Completion, 0, samples=()),
    "completion of another request": edit(Completion, 0, request_id="y"),
    "another prompt": edit(Completion, 0, prompt_ids=(5, 7)),
    "another seed": edit(Completion, 0, sampling=replace(SAMPLING, seed=4)),
    "another temperature": edit(Completion, 0, sampling=replace(SAMPLING, temperature=0.5)),
    "a filter that nobody asked for": edit(Completion, 0, sampling=replace(SAMPLING, top_k=20)),
    "a longer budget": edit(Completion, 0, sampling=replace(SAMPLING, max_tokens=11)),
    "more tokens than the budget": edit(Completion, 0, sampling=replace(SAMPLING, max_tokens=9)),
}


class TestConservation:
    """C6 of the design, and case C6: a hard error, never padding."""

    async def test_the_stream_as_it_is(self) -> None:
        assembler = Assembler(REQUEST)
        for event in await events_of(REQUEST):
            assembler.add(event)
        assert [len(sample.token_ids) for sample in assembler.result().samples] == [10, 10]

    @pytest.mark.parametrize("name", BROKEN)
    async def test_every_breach_is_an_error(self, name: str) -> None:
        events = await events_of(REQUEST)
        BROKEN[name](events)
        assembler = Assembler(REQUEST)
        with pytest.raises(ParityError, match="'x'"):
            for event in events:
                assembler.add(event)
            assembler.result()

    async def test_a_sample_without_tokens(self) -> None:
        request = replace(REQUEST, n=1)
        *_, end, completion = await events_of(request)
        assert isinstance(end, SampleSummary)
        assert isinstance(completion, Completion)
        empty = replace(end, num_tokens=0, spans=())
        assembler = Assembler(request)
        assembler.add(empty)
        assembler.add(replace(completion, samples=(empty,)))
        sample = assembler.result().samples[0]
        assert sample.row_digests is not None
        lengths = [a.size for a in (sample.token_ids, sample.policy_logprobs, sample.row_digests, sample.mask)]
        assert lengths == [0, 0, 0, 0]

    async def test_two_versions_in_one_sample(self) -> None:
        request = replace(REQUEST, n=1)
        events = await events_of(request)
        edit(TokenChunk, 2, weight_version=2)(events)
        spans = (VersionSpan(1, 0, 8), VersionSpan(2, 8, 10))
        edit(SampleSummary, 0, spans=spans)(events)
        edit(Completion, 0, samples=(events[-2],))(events)
        assembler = Assembler(request)
        for event in events:
            assembler.add(event)
        assert assembler.result().samples[0].spans == spans

    def test_scores(self) -> None:
        request = ScoreRequest("s", (ScoreSequence((1, 2, 3)), ScoreSequence((1, 2, 3), 2)))
        scores = (SequenceScore(np.zeros(2, np.float32)), SequenceScore(np.zeros(1, np.float32)))
        result = ScoreResult("s", scores, 1.0, LogprobMode.TEMPERED, 1, "d")
        assert check_scores(request, result) is result
        for broken in (
            replace(result, scores=scores[:1]),
            replace(result, scores=scores[::-1]),
            replace(result, scores=(scores[0], replace(scores[1], row_digests=np.zeros(1, np.uint64)))),
            replace(result, request_id="t"),
            replace(result, temperature=0.5),
        ):
            with pytest.raises(ParityError):
                check_scores(request, broken)


ASKED = SamplingParams(
    temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1, seed=2**64 - 1, max_tokens=9, stop=("a",), barred_token_ids=(5,)
)
USED = replace(ASKED, temperature=float(np.float32(0.7)), top_k=0, seed=-1)


class TestEcho:
    """A9: a parameter that a path loses shows at the client, whichever it is."""

    def test_what_the_service_may_change(self) -> None:
        assert echo_difference(ASKED, USED) == ""
        assert echo_difference(ASKED, replace(USED, max_tokens=3, barred_token_ids=(5, 6))) == ""
        open_ended = replace(ASKED, seed=None, max_tokens=None, barred_token_ids=(6, 5, 6))
        assert echo_difference(open_ended, replace(USED, seed=9, max_tokens=100, barred_token_ids=(5, 6))) == ""

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", 1.0),
            ("temperature", float(np.nextafter(np.float32(0.7), np.float32(1)))),
            ("top_k", 20),
            ("top_p", 1.0),
            ("min_p", 0.0),
            ("seed", 5),
            ("seed", None),
            ("max_tokens", 10),
            ("max_tokens", None),
            ("stop_token_ids", (3,)),
            ("stop", ()),
            ("include_stop", True),
            ("ignore_eos", True),
            ("bar_undefined_tokens", True),
            ("barred_token_ids", ()),
        ],
    )
    def test_anything_else_is_named(self, field: str, value: Any) -> None:
        assert echo_difference(ASKED, replace(USED, **{field: value})).startswith(f"{field} ")
