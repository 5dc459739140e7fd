"""Routing, delivery and deaths, over replicas that do exactly what a test scripts."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from rollout.errors import CapacityExceeded, ParityError, ReplicaUnavailable, RolloutError
from rollout.events import Event, FailureEvent, ScoreEvent
from rollout.router import LiveSample, Router
from rollout.types import (
    FinishDetail,
    FinishReason,
    ReplicaLoad,
    SampleEvent,
    SampleRequest,
    SampleSummary,
    ScoreOptions,
    ScoreSequence,
    SequenceScore,
    TokenChunk,
    VersionSpan,
    WeightState,
)
from rollout.worker import WorkerInfo
from tests.services import bits_of_chunks, sampling, soon


def gone() -> ReplicaUnavailable:
    return ReplicaUnavailable("worker is gone")


class ScriptedReplica:
    """Records calls; answers from ``answers`` (a value, an error to raise, an event to wait for); dies on demand."""

    def __init__(self, name: str, version: int = 1) -> None:
        self.name = name
        self.version = version
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self.made: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.events: asyncio.Queue[list[Event] | Exception] = asyncio.Queue()

    async def call(self, method: str, *args: Any) -> Any:
        if method == "next_events":
            batch = await self.events.get()
            if isinstance(batch, Exception):
                raise batch
            return batch
        self.calls.append((method, *args))
        self.made[method].set()
        answer = self.answers.get(method)
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            answer = self.answers[method] if self.answers[method] is not answer else None
        if isinstance(answer, Exception):
            raise answer
        if method == "info":
            return WorkerInfo(self.name, 64, 512, (1,), {}, WeightState(self.version, "aa"))
        if method == "load":
            return ReplicaLoad(self.name, True, 0, 0, 8, 8, WeightState(self.version, "aa"))
        return len(args[0]) if method == "abort" else answer

    async def share(self, value: Any) -> Any:
        return value

    async def stop(self) -> None:
        self.calls.append(("stop",))

    def submitted(self) -> list[str]:
        return [r.sample_id for method, *args in self.calls if method == "submit" for r in args[0]]

    def aborted(self) -> list[str]:
        return [i for method, *args in self.calls if method == "abort" for i in args[0]]

    def emit(self, *events: Event) -> None:
        self.events.put_nowait(list(events))

    def die(self) -> None:
        self.events.put_nowait(gone())


class Rig:
    """Two replicas, a started router."""

    def __init__(self) -> None:
        self.a, self.b = ScriptedReplica("a"), ScriptedReplica("b")
        self.router = Router([self.a, self.b])

    def sample(self, name: str) -> LiveSample:
        return LiveSample(SampleRequest(name, (3,), sampling()), asyncio.Queue())

    async def submit(self, *names: str) -> list[LiveSample]:
        samples = [self.sample(name) for name in names]
        await self.router.submit(samples)
        return samples


@pytest.fixture
async def rig() -> Any:
    rig = Rig()
    rig.router.start()
    yield rig
    await rig.router.stop()


def chunk(name: str, offset: int, count: int, *, version: int = 1, salt: int = 0, digests: bool = False) -> SampleEvent:
    """Tokens that depend on their index and ``salt`` alone, as C2 wants it."""
    index = np.arange(offset, offset + count)
    logprobs = (-1.0 / (index + 1 + salt)).astype(np.float32)
    hashed = (index + salt).astype(np.uint64) if digests else None
    return SampleEvent(
        name, TokenChunk(0, offset, (index + 2 + salt).astype(np.int32), logprobs, logprobs.copy(), version, hashed)
    )


def end(name: str, count: int, *spans: VersionSpan) -> SampleEvent:
    spans = spans or (VersionSpan(1, 0, count),)
    return SampleEvent(name, summary=SampleSummary(0, count, FinishDetail(FinishReason.LENGTH), spans))


async def delivered(sample: LiveSample) -> list[Any]:
    """Everything up to the end or the error of a sample."""
    items: list[Any] = []
    while not items or not isinstance(items[-1], SampleSummary | ScoreEvent | RolloutError):
        items.append(await soon(sample.queue.get()))
    return items


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_least_loaded_replica_is_chosen(rig: Rig) -> None:
    await rig.submit("s0", "s1")
    await rig.submit("s2")
    (s3,) = await rig.submit("s3")
    assert (rig.a.submitted(), rig.b.submitted()) == (["s0", "s1"], ["s2", "s3"])
    rig.b.emit(end("s2", 0, VersionSpan(1, 0, 0)), end("s3", 0, VersionSpan(1, 0, 0)))
    await delivered(s3)
    await rig.submit("s4")
    assert rig.b.submitted()[-1] == "s4"
    assert rig.router.num_live == 3


async def test_events_before_the_acknowledgement_are_delivered(rig: Rig) -> None:
    rig.a.answers["submit"] = ack = asyncio.Event()
    sample = rig.sample("s")
    task = asyncio.ensure_future(rig.router.submit([sample]))
    await rig.a.made["submit"].wait()
    rig.a.emit(chunk("s", 0, 2), end("s", 2))
    assert len(await delivered(sample)) == 2
    ack.set()
    await task
    assert rig.router.num_live == 0


async def test_a_refused_submission_is_forgotten(rig: Rig) -> None:
    rig.a.answers["submit"] = CapacityExceeded("full")
    with pytest.raises(CapacityExceeded):
        await rig.submit("s", "t")
    assert rig.router.num_live == 0


async def test_events_of_unknown_samples_are_ignored(rig: Rig) -> None:
    (sample,) = await rig.submit("s")
    rig.a.emit(chunk("other", 0, 1), end("other", 1), chunk("s", 0, 1), end("s", 1))
    assert [type(item) for item in await delivered(sample)] == [TokenChunk, SampleSummary]


async def test_failures_and_scores_end_their_sequences(rig: Rig) -> None:
    (sample,) = await rig.submit("s")
    queue: asyncio.Queue[Any] = asyncio.Queue()
    await rig.router.submit_scores(["x"], [ScoreSequence((3, 4))], ScoreOptions(), queue)
    rig.a.emit(FailureEvent("s", ParityError("NaN")))
    rig.b.emit(ScoreEvent("x", SequenceScore(np.zeros(1, np.float32)), 1))
    assert isinstance((await delivered(sample))[-1], ParityError)
    assert isinstance(await soon(queue.get()), ScoreEvent)
    assert rig.router.num_live == 0


# ---- deaths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(3, 7), (7,), (2, 1, 4), (10,)])
async def test_a_replay_continues_where_delivery_stopped(rig: Rig, cuts: tuple[int, ...]) -> None:
    """However the second replica cuts its chunks, every token comes once."""
    (sample,) = await rig.submit("s")
    rig.a.emit(chunk("s", 0, 2, digests=True), chunk("s", 2, 3, digests=True))
    rig.a.die()
    await soon(rig.b.made["submit"].wait())
    at = 0
    for size in (*cuts, 12 - sum(cuts)):
        rig.b.emit(chunk("s", at, size, digests=True))
        at += size
    rig.b.emit(end("s", 12))
    items = await delivered(sample)
    (whole,) = bits_of_chunks(item for item in items if isinstance(item, TokenChunk))
    undisturbed = chunk("s", 0, 12, digests=True).chunk
    assert undisturbed is not None
    assert [whole] == bits_of_chunks([undisturbed])
    assert len(items) > 3, "control: some came from the first replica"


async def test_with_no_replica_left_the_sample_fails(rig: Rig) -> None:
    (sample,) = await rig.submit("s")
    rig.b.die()
    await settle()
    rig.a.emit(chunk("s", 0, 2))
    rig.a.die()
    assert isinstance((await delivered(sample))[-1], ReplicaUnavailable)
    with pytest.raises(ReplicaUnavailable, match="no replica is alive"):
        await rig.submit("t")
    assert [(load.name, load.healthy) for load in await rig.router.loads()] == [("a", False), ("b", False)]
    assert rig.router.num_live == 0


async def test_tokens_of_an_older_version_cannot_be_replayed(rig: Rig) -> None:
    old, fresh = await rig.submit("s", "t")
    rig.a.emit(chunk("s", 0, 2, version=1))
    await soon(old.queue.get())
    rig.b.version = 2
    rig.a.die()
    error = (await delivered(old))[-1]
    assert isinstance(error, ReplicaUnavailable) and "versions [1]" in error.message
    await soon(rig.b.made["submit"].wait())
    assert rig.b.submitted() == ["t"], "control: nothing of it was delivered, so any version may draw it"
    assert fresh.queue.empty()


async def test_an_update_during_a_replay_never_mixes_two_draws(rig: Rig) -> None:
    """Five tokens came from version 1; the replay draws the fourth and fifth anew, under version 2."""
    (sample,) = await rig.submit("s")
    rig.a.emit(chunk("s", 0, 5))
    rig.a.die()
    await soon(rig.b.made["submit"].wait())
    rig.b.emit(chunk("s", 0, 3), chunk("s", 3, 4, version=2, salt=20))
    rig.b.emit(end("s", 7, VersionSpan(1, 0, 3), VersionSpan(2, 3, 7)))
    items = await delivered(sample)
    assert isinstance(items[-1], ReplicaUnavailable), "tokens 5 and 6 follow from tokens that the client never got"
    await settle()
    assert rig.router.num_live == 0


async def test_a_sample_dropped_during_its_replay_does_not_come_back(rig: Rig) -> None:
    """Its client left while the other replica was being asked for its version."""
    await rig.submit("s")
    rig.b.answers["info"] = gate = asyncio.Event()
    rig.a.die()
    await soon(rig.b.made["info"].wait())
    await soon(rig.router.drop(["s"], "the client left"))
    gate.set()
    await settle()
    assert set(rig.b.submitted()) <= set(rig.b.aborted()), "a sample without a reader holds pages to its end"
    assert rig.router.num_live == 0


async def test_abort_finds_a_sample_during_its_replay(rig: Rig) -> None:
    (sample,) = await rig.submit("s")
    rig.b.answers["info"] = gate = asyncio.Event()
    rig.a.die()
    await soon(rig.b.made["info"].wait())
    abort = asyncio.ensure_future(rig.router.abort(["s"], "enough"))
    await settle()
    gate.set()
    assert await soon(abort) == 1
    assert sample.request is not None and rig.b.submitted() == rig.b.aborted() == ["s"]


async def test_a_submission_to_a_dead_replica_goes_to_a_living_one(rig: Rig) -> None:
    """The death has not been noticed yet: nothing was admitted, so nothing is lost by asking the next."""
    rig.a.answers["submit"] = gone()
    (sample,) = await rig.submit("s")
    await soon(rig.b.made["submit"].wait())
    assert rig.b.submitted() == ["s"]
    rig.b.emit(chunk("s", 0, 1), end("s", 1))
    assert isinstance((await delivered(sample))[-1], SampleSummary)


async def test_a_death_noticed_during_the_submission_answers_once(rig: Rig) -> None:
    """The reader of events sees the death first and replays; the failed call must not end the sample too."""
    rig.a.answers["submit"] = gate = asyncio.Event()
    sample = rig.sample("s")
    task = asyncio.ensure_future(rig.router.submit([sample]))
    await rig.a.made["submit"].wait()
    rig.a.die()
    await soon(rig.b.made["submit"].wait())
    rig.a.answers["submit"] = gone()
    gate.set()
    await settle()
    await soon(task)
    rig.b.emit(chunk("s", 0, 1), end("s", 1))
    assert [type(item) for item in await delivered(sample)] == [TokenChunk, SampleSummary]
    assert rig.b.submitted() == ["s"]


async def test_a_call_to_a_dead_replica_is_asked_of_a_living_one(rig: Rig) -> None:
    rig.a.answers["check"] = gone()
    rig.b.answers["check"] = "checked"
    assert await rig.router.any("check") == "checked"


# ---- calls to all -----------------------------------------------------------------------------------------------


async def test_all_waits_for_every_replica_before_it_raises(rig: Rig) -> None:
    rig.a.answers["stage"] = ParityError("no")
    rig.b.answers["stage"] = gate = asyncio.Event()
    task = asyncio.ensure_future(rig.router.all("stage"))
    await settle()
    assert not task.done()
    gate.set()
    with pytest.raises(ParityError):
        await task


async def test_clean_up_reaches_every_replica_whatever_the_first_says(rig: Rig) -> None:
    rig.a.answers["release"] = RuntimeError("no error of ours")
    await rig.router.all_that_can("release")
    assert ("release",) in rig.b.calls


async def test_stop_answers_what_is_live(rig: Rig) -> None:
    (sample,) = await rig.submit("s")
    await rig.router.stop()
    assert isinstance((await delivered(sample))[-1], ReplicaUnavailable)
    assert ("stop",) in rig.a.calls and ("stop",) in rig.b.calls


async def test_nonsense_from_a_replica_fences_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    (sample,) = await rig.submit("s")
    rig.a.events.put_nowait(ValueError("not a record"))
    await soon(rig.b.made["submit"].wait())
    rig.b.emit(chunk("s", 0, 1), end("s", 1))
    assert isinstance((await delivered(sample))[-1], SampleSummary)
    assert "not a record" in caplog.text
