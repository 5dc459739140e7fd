"""Routing, delivery and deaths, over replicas that do exactly what a test scripts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollout.errors import CapacityExceeded, ParityError, ReplicaUnavailable, WeightsMoved
from rollout.events import FailureEvent, ScoreEvent
from rollout.router import MAX_DEATHS, Router
from rollout.slot import LiveSample
from rollout.spans import BegunSample
from rollout.types import (
    SampleRequest,
    SampleSummary,
    ScoreOptions,
    ScoreSequence,
    SequenceScore,
    TokenChunk,
    UpdatePolicy,
    VersionSpan,
)
from tests.rollout.replicas import Rig, ScriptedReplica, chunk, delivered, end, gone, settle
from tests.services import bits_of_chunks, sampling, soon


@pytest.fixture
async def rig() -> Any:
    rig = Rig()
    rig.router.start()
    yield rig
    await rig.router.stop()


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


# ---- going on -----------------------------------------------------------------------------------------------------


async def test_a_replay_asks_for_the_rest_only(rig: Rig) -> None:
    (sample,) = await rig.submit("s")
    rig.a.emit(chunk("s", 0, 3), chunk("s", 3, 2))
    for _ in range(2):
        await soon(sample.queue.get())
    rig.a.die()
    await soon(rig.b.made["submit"].wait())
    ((_, (request,)),) = [call for call in rig.b.calls if call[0] == "submit"]
    assert request.begun.token_ids == (2, 3, 4, 5, 6) and request.begun.spans == (VersionSpan(1, 0, 5),)
    rig.b.emit(chunk("s", 5, 7), end("s", 12))
    items = await delivered(sample)
    assert [item.offset for item in items[:-1]] == [5]


@pytest.mark.parametrize("policy", list(UpdatePolicy))
async def test_what_an_update_means_for_a_begun_sample(rig: Rig, policy: UpdatePolicy) -> None:
    """Only under the policy by which undisturbed samples cross it may one cross it whose replica died."""
    (sample,) = await rig.submit("s")
    rig.a.emit(chunk("s", 0, 5))
    await soon(sample.queue.get())
    rig.router.weights_will_change(2, policy)
    rig.b.version = 2
    rig.a.die()
    if policy is UpdatePolicy.RECOMPUTE:
        await soon(rig.b.made["submit"].wait())
        rig.b.emit(chunk("s", 5, 2, version=2), end("s", 7))
        assert [type(item) for item in await delivered(sample)] == [TokenChunk, SampleSummary]
    else:
        assert isinstance((await delivered(sample))[-1], WeightsMoved)


@pytest.mark.parametrize("policy", list(UpdatePolicy))
async def test_an_update_between_a_replays_placement_and_its_first_token(rig: Rig, policy: UpdatePolicy) -> None:
    (sample,) = await rig.submit("s")
    rig.a.emit(chunk("s", 0, 5))
    await soon(sample.queue.get())
    rig.a.die()
    await soon(rig.b.made["submit"].wait())
    rig.router.weights_will_change(2, policy)
    rig.b.emit(chunk("s", 5, 2, version=2), end("s", 7))
    last = (await delivered(sample))[-1]
    assert isinstance(last, SampleSummary if policy is UpdatePolicy.RECOMPUTE else WeightsMoved)


async def test_an_undisturbed_sample_may_cross_any_update(rig: Rig) -> None:
    """The engine has seen to the policy: a sample that it lets go on goes on."""
    (sample,) = await rig.submit("s")
    rig.a.emit(chunk("s", 0, 5), chunk("s", 5, 2, version=2), end("s", 7))
    assert isinstance((await delivered(sample))[-1], SampleSummary)


async def test_skipped_tokens_are_no_sample(rig: Rig) -> None:
    (sample,) = await rig.submit("s")
    rig.a.emit(chunk("s", 0, 3), chunk("s", 4, 3), end("s", 7))
    assert isinstance((await delivered(sample))[-1], ParityError)
    await settle()
    assert rig.a.aborted() == ["s"] and rig.router.num_live == 0


async def test_a_sample_that_ends_every_replica_is_given_up() -> None:
    """Whatever it is about it: the others must not die of it one after the other."""
    replicas = [ScriptedReplica(f"r{i}") for i in range(MAX_DEATHS + 2)]
    router = Router(list(replicas))
    router.start()
    sample = LiveSample(SampleRequest("s", (3,), sampling()), asyncio.Queue())
    await router.submit([sample])
    for _ in range(MAX_DEATHS + 1):
        holder = next(slot for slot in router.slots() if slot.live)
        await soon(holder.replica.made["submit"].wait())  # type: ignore[attr-defined]
        holder.replica.die()  # type: ignore[attr-defined]
        while holder.alive:
            await asyncio.sleep(0)
        await settle()
    error = (await delivered(sample))[-1]
    assert isinstance(error, ReplicaUnavailable) and "in a row" in error.message
    assert sum(slot.alive for slot in router.slots()) == 1
    await router.stop()


async def test_the_rest_of_a_sample_that_a_client_has_the_beginning_of(rig: Rig) -> None:
    begun = BegunSample((2, 3, 4), (VersionSpan(1, 0, 3),))
    request = SampleRequest("s", (3,), sampling())
    sample = LiveSample.resumed(request, begun, asyncio.Queue())
    await soon(rig.router.submit_begun(sample))
    holder = rig.a if rig.a.submitted() else rig.b
    holder.emit(chunk("s", 3, 1), end("s", 4))
    assert [type(item) for item in await delivered(sample)] == [TokenChunk, SampleSummary]
    other = LiveSample.resumed(request, BegunSample((2,), (VersionSpan(7, 0, 1),)), asyncio.Queue())
    await soon(rig.router.submit_begun(other))
    assert isinstance((await delivered(other))[-1], WeightsMoved), "nobody serves version 7"
    assert rig.router.num_live == 0


async def test_policies_of_long_ago_are_forgotten_and_nothing_crosses_what_is_not_known(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.router.MAX_POLICIES", 3)
    for version in range(1, 7):
        rig.router.weights_will_change(version, UpdatePolicy.WAIT if version == 3 else UpdatePolicy.RECOMPUTE)
    assert sorted(rig.router._policies) == [4, 5, 6]

    def may(begun_under: int) -> bool:
        live = LiveSample(None, asyncio.Queue(), versions={begun_under})
        return rig.router._may_go_on(live, 6)

    # Update 3 was one to wait for: who was begun under 2 must not cross it, known or not.
    assert [may(v) for v in range(1, 7)] == [False, False, True, True, True, True]
