"""Events between the engine's thread and its reader: nothing lost, nothing reordered, versions kept apart."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.chunks import merge_chunks
from rollout.errors import ParityError
from rollout.events import Event, FailureEvent, ScoreEvent
from rollout.outbox import Outbox
from rollout.types import FinishDetail, FinishReason, SampleEvent, SampleSummary, SequenceScore, TokenChunk


def chunk(offset: int, version: int = 0, digests: bool = False, count: int = 1) -> TokenChunk:
    values = np.arange(offset, offset + count)
    return TokenChunk(
        sample_index=3,
        offset=offset,
        token_ids=values.astype(np.int32),
        policy_logprobs=-values.astype(np.float32),
        behavior_logprobs=-2 * values.astype(np.float32),
        weight_version=version,
        row_digests=values.astype(np.uint64) if digests else None,
    )


def end(count: int) -> SampleSummary:
    return SampleSummary(3, count, FinishDetail(FinishReason.STOP), ())


def told(events: list[Event]) -> list[tuple[str, object]]:
    """Short form: ids of a chunk with its version, or the kind of end."""
    result: list[tuple[str, object]] = []
    for event in events:
        if isinstance(event, SampleEvent):
            if event.chunk is not None:
                result.append((event.sample_id, (event.chunk.token_ids.tolist(), event.chunk.weight_version)))
            if event.summary is not None:
                result.append((event.sample_id, "end"))
        else:
            result.append((event.sample_id, type(event).__name__))
    return result


def test_neighbouring_chunks_are_joined() -> None:
    outbox = Outbox()
    outbox.put([SampleEvent("a", chunk(0, digests=True)), SampleEvent("b", chunk(0))])
    outbox.put([SampleEvent("a", chunk(1, digests=True)), SampleEvent("a", chunk(2, digests=True), end(3))])
    events = outbox.take(0)
    assert told(events) == [("a", ([0, 1, 2], 0)), ("a", "end"), ("b", ([0], 0))]
    first = events[0]
    assert isinstance(first, SampleEvent) and first.chunk is not None
    assert first.chunk.offset == 0 and first.chunk.sample_index == 3
    assert first.chunk.policy_logprobs.tolist() == [0, -1, -2] and first.chunk.behavior_logprobs.tolist() == [0, -2, -4]
    assert first.chunk.row_digests is not None and first.chunk.row_digests.tolist() == [0, 1, 2]
    assert first.chunk.row_digests.dtype == np.uint64
    assert outbox.take(0) == []


def test_weight_versions_are_kept_apart() -> None:
    merged = merge_chunks([chunk(0, 1), chunk(1, 1), chunk(2, 2), chunk(3, 1)])
    assert [(c.token_ids.tolist(), c.weight_version, c.offset) for c in merged] == [
        ([0, 1], 1, 0),
        ([2], 2, 2),
        ([3], 1, 3),
    ]


def test_tokens_come_before_a_failure() -> None:
    outbox = Outbox()
    outbox.put([SampleEvent("a", chunk(0)), FailureEvent("a", ParityError("x"))])
    outbox.put([ScoreEvent("s", SequenceScore(np.zeros(1, np.float32)), 0)])
    assert told(outbox.take(0)) == [("a", ([0], 0)), ("a", "FailureEvent"), ("s", "ScoreEvent")]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(0, 2)), max_size=25), st.data())
def test_every_sample_reads_as_it_was_told(steps: list[tuple[str, int, int]], data: st.DataObject) -> None:
    outbox, told_ids, told_versions = Outbox(), dict.fromkeys("abc", 0), {n: list[int]() for n in "abc"}
    events: list[Event] = []
    for name, count, version in steps:
        outbox.put([SampleEvent(name, chunk(told_ids[name], version, count=count))])
        told_ids[name] += count
        told_versions[name] += [version] * count
        if data.draw(st.booleans()):
            events += outbox.take(0)
    outbox.put([SampleEvent(n, summary=end(c)) for n, c in told_ids.items()])
    events += outbox.take(0)
    for name in "abc":
        mine = [e for e in events if isinstance(e, SampleEvent) and e.sample_id == name]
        chunks = [e.chunk for e in mine if e.chunk is not None]
        assert [t for c in chunks for t in c.token_ids.tolist()] == list(range(told_ids[name]))
        assert [v for c in chunks for v in [c.weight_version] * len(c.token_ids)] == told_versions[name]
        assert all(c.token_ids[0] == c.offset for c in chunks)
        assert [e.summary is not None for e in mine] == [False] * (len(mine) - 1) + [True]


def test_a_reader_is_woken_by_events_and_by_the_end() -> None:
    outbox, got = Outbox(), list[int]()

    def read() -> None:
        got.append(len(outbox.take(60)))
        got.append(len(outbox.take(60, gather_s=60)))

    reader = threading.Thread(target=read)
    reader.start()
    outbox.put([SampleEvent("a", chunk(0))])
    # Closing must cut short both the wait for an event and the wait for company.
    outbox.close()
    reader.join(30)
    assert not reader.is_alive() and got == [1, 0]


def test_an_ended_sample_does_not_wait_for_company() -> None:
    outbox = Outbox()
    outbox.put([SampleEvent("a", chunk(0)), SampleEvent("b", chunk(0))])
    outbox.put([SampleEvent("a", chunk(1), end(2)), ScoreEvent("s", SequenceScore(np.zeros(1, np.float32)), 0)])
    outbox.put([SampleEvent("b", chunk(1))])
    hour = 3600.0
    assert told(outbox.take(hour, gather_s=hour)) == [("a", ([0, 1], 0)), ("a", "end"), ("s", "ScoreEvent")]
    outbox.put([FailureEvent("b", ParityError("x"))])
    assert told(outbox.take(hour, gather_s=hour)) == [("b", ([0, 1], 0)), ("b", "FailureEvent")]
    outbox.put([SampleEvent("c", chunk(0))])
    assert told(outbox.take(hour, gather_s=0.001)) == [("c", ([0], 0))], "without an end the wait is for gather_s"
    assert outbox.take(0) == []


def test_the_wait_for_company_is_counted_from_the_oldest_event(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("rollout.outbox.monotonic", lambda: now)
    outbox = Outbox()
    outbox.put([SampleEvent("a", chunk(0))])
    now = 50.0
    outbox.put([SampleEvent("b", chunk(0), end(1))])
    now = 61.0
    assert told(outbox.take(0, gather_s=60)) == [("b", ([0], 0)), ("b", "end"), ("a", ([0], 0))]
