"""A replica by itself: commands between steps, pausing, the phases of an update, and what a broken engine answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import CapacityExceeded, InvalidRequest, NotFound, ReplicaUnavailable, WeightUpdateError
from rollout.events import Event, FailureEvent, ScoreEvent
from rollout.types import (
    FinishReason,
    SampleEvent,
    SampleRequest,
    SampleSummary,
    ScoreOptions,
    ScoreSequence,
    TensorChunk,
    UpdatePolicy,
    WeightUpdate,
)
from rollout.weights import digest_of, root_digest, tensor_bytes
from rollout.worker import Worker, load_tokenizer
from tests.services import (
    CHUNK,
    PROMPT,
    Bits,
    StepGate,
    bits_of_chunks,
    engine_bits,
    generated,
    loop_turns,
    mixed_requests,
    queued,
    sampling,
    soon,
    tensors_of,
    tiny_settings,
    version_path,
    word_tokenizer,
)

LONG = ScoreSequence(PROMPT * 60)


class Rig:
    """A worker and what came out of it."""

    def __init__(self, path: Path, **engine: Any) -> None:
        self.path = path
        self.worker = Worker(tiny_settings(path, **engine), str(path), "w")
        self.thread = self.worker._thread

    async def submit(self, name: str, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> None:
        await self.worker.submit([await self.worker.check(SampleRequest(name, prompt, sampling(**fields)))])

    async def until_ended(self, names: set[str]) -> list[Event]:
        """Events up to the last end of the named sequences."""
        events: list[Event] = []
        while names:
            batch = await soon(self.worker.next_events(1.0))
            events += batch
            names = names - {e.sample_id for e in batch if not isinstance(e, SampleEvent) or e.summary is not None}
        return events

    async def stage(self, seed: int, version: int) -> None:
        tensors = tensors_of(version_path(self.path, seed))
        digest = root_digest({name: digest_of(name, tensor) for name, tensor in tensors})
        await self.worker.stage(WeightUpdate(version, digest, len(tensors)))
        chunks = [
            TensorChunk(name, "float32", tuple(tensor.shape), 0, bytes(tensor_bytes(tensor)))
            for name, tensor in tensors
        ]
        await self.worker.stage_chunks(chunks)

    async def update(self, seed: int, version: int, policy: UpdatePolicy) -> None:
        await self.stage(seed, version)
        await self.worker.verify_stage()
        await soon(self.worker.quiesce(policy))
        await self.worker.commit()
        await self.worker.release()


@pytest.fixture
async def rig(tiny_qwen3_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tiny_qwen3_path)
    yield rig
    await rig.worker.shutdown()


def sample_bits(events: list[Event], name: str) -> Bits:
    mine = [e for e in events if isinstance(e, SampleEvent) and e.sample_id == name]
    (only,) = bits_of_chunks(e.chunk for e in mine if e.chunk is not None)
    return only


def summary_of(events: list[Event], name: str) -> SampleSummary:
    ends = [e.summary for e in events if isinstance(e, SampleEvent) and e.sample_id == name and e.summary is not None]
    assert len(ends) == 1, "one end each"
    return ends[0]


async def test_a_worker_answers_as_its_engine_would(rig: Rig) -> None:
    requests = mixed_requests(3)
    expected = engine_bits(tiny_settings(rig.path), requests)
    samples = [
        SampleRequest(f"{r.request_id}/{i}", r.prompt_ids, r.sampling, i, True) for r in requests for i in range(r.n)
    ]
    await rig.worker.submit([await rig.worker.check(sample) for sample in samples])
    events = await rig.until_ended({s.sample_id for s in samples})
    got = [[sample_bits(events, f"{r.request_id}/{i}") for i in range(r.n)] for r in requests]
    assert got == expected
    assert engine_bits(tiny_settings(rig.path), requests[::-1])[0] != expected[0], "control: other requests"


async def test_info_and_load(rig: Rig) -> None:
    info, load = await rig.worker.info(), await rig.worker.load()
    assert (info.name, info.vocab_size, info.context_length, info.eos_token_ids) == ("w", 64, 512, (1,))
    assert (load.healthy, load.running, load.waiting, load.free_pages) == (True, 0, 0, load.total_pages)
    assert info.weights == load.weights
    assert info.manifest["kernels.page_size"] == "16"


async def test_samples_are_queued_all_or_none(tiny_qwen3_path: Path) -> None:
    rig = Rig(tiny_qwen3_path, max_waiting=2, max_running=1)
    samples = [await rig.worker.check(SampleRequest(f"s{i}", PROMPT, sampling())) for i in range(3)]
    await rig.worker.pause()
    with pytest.raises(CapacityExceeded, match="2"):
        await rig.worker.submit(samples)
    with pytest.raises(InvalidRequest):
        await rig.worker.submit_scores(["a", "b"], [LONG, ScoreSequence((3, 64))], ScoreOptions())
    assert rig.thread.engine.live_ids == []
    await rig.worker.submit(samples[:2])
    assert rig.thread.engine.live_ids == ["s0", "s1"], "control: two fit"
    assert await rig.worker.abort(["s0", "gone", "s1"], "enough") == 2
    events = await rig.until_ended({"s0", "s1"})
    assert {summary_of(events, n).finish.message for n in ("s0", "s1")} == {"enough"}
    await rig.worker.shutdown()


@pytest.mark.parametrize("where", ["waiting", "prefill", "decode"])
async def test_abort_in_each_state_frees_every_page(tiny_qwen3_path: Path, where: str) -> None:
    rig = Rig(tiny_qwen3_path, max_running=1)
    pages = rig.thread.engine.pages
    async with StepGate(rig.thread, 8 if where == "decode" else 2) as gate:
        await rig.worker.pause()
        await rig.submit("first", PROMPT * 25)
        await rig.submit("second")
        await rig.worker.resume()
        await gate.reached()
        victim = "second" if where == "waiting" else "first"
        assert (rig.thread.engine._live["first"].num_generated > 0) == (where == "decode")
        assert pages.num_free < pages.num_pages, "control: pages are held"
        abort = await queued(rig.thread, rig.worker.abort([victim], "leave"))
        gate.open()
        assert await soon(abort) == 1
    events = await rig.until_ended({"first", "second"})
    end = summary_of(events, victim)
    assert (end.finish.reason, end.finish.message) == (FinishReason.ABORTED, "leave")
    # 75 tokens of prompt are 4 chunks, the last of which gives a token: 5 by the 8th step.
    assert end.num_tokens == (5 if where == "decode" else 0)
    assert sum(span.end - span.start for span in end.spans) == end.num_tokens
    assert CHUNK * 3 < 75
    rig.thread.engine.scheduler.check()
    assert pages.num_free == pages.num_pages
    await rig.worker.shutdown()


async def test_the_partial_output_is_a_prefix(rig: Rig) -> None:
    async with StepGate(rig.thread, 10) as gate:
        await rig.submit("s")
        await gate.reached()
        abort = await queued(rig.thread, rig.worker.abort(["s"], "leave"))
        gate.open()
        await soon(abort)
    partial = sample_bits(await rig.until_ended({"s"}), "s")
    await rig.submit("t")
    whole = sample_bits(await rig.until_ended({"t"}), "t")
    await rig.submit("u", seed=8)
    other = sample_bits(await rig.until_ended({"u"}), "u")
    assert len(partial.ids) == 10
    assert (partial.ids, partial.policy) == (whole.ids[:10], whole.policy[:40])
    assert partial.ids != other.ids[:10], "control: another seed"


# ---- pausing ----------------------------------------------------------------------------------------------------


async def test_no_token_between_pause_and_resume(rig: Rig) -> None:
    async with StepGate(rig.thread, 5) as gate:
        await rig.submit("s", max_tokens=500)
        await gate.reached()
        pause = await queued(rig.thread, rig.worker.pause())
        gate.open()
        await soon(pause)
    await loop_turns(rig.thread)
    assert generated(rig.thread) == {"s": 5}
    async with StepGate(rig.thread, 10) as gate:
        await rig.worker.resume()
        await gate.reached()
        assert generated(rig.thread) == {"s": 15}, "control: free to go, it goes"
        abort = await queued(rig.thread, rig.worker.abort(["s"], "enough"))
        gate.open()
        await soon(abort)
    assert summary_of(await rig.until_ended({"s"}), "s").num_tokens == 15


async def test_wait_while_paused_is_refused_by_name(rig: Rig) -> None:
    async with StepGate(rig.thread, 5) as gate:
        await rig.submit("s")
        await gate.reached()
        pause = await queued(rig.thread, rig.worker.pause())
        gate.open()
        await soon(pause)
    with pytest.raises(WeightUpdateError, match=r"wait.*paused.*resume"):
        await soon(rig.worker.quiesce(UpdatePolicy.WAIT))
    await rig.worker.release()
    await rig.worker.resume()
    assert summary_of(await rig.until_ended({"s"}), "s").num_tokens == 40
    await soon(rig.worker.quiesce(UpdatePolicy.WAIT))
    await rig.worker.release()


async def test_pause_during_a_waiting_update_ends_the_wait(rig: Rig) -> None:
    """The same refusal, asked in the other order: else the update would hang until somebody resumes."""
    async with StepGate(rig.thread, 5) as gate:
        await rig.submit("s")
        await gate.reached()
        wait = await queued(rig.thread, rig.worker.quiesce(UpdatePolicy.WAIT))
        pause = await queued(rig.thread, rig.worker.pause())
        gate.open()
        await soon(pause)
    with pytest.raises(WeightUpdateError, match="pause"):
        await asyncio.wait_for(wait, 5)
    await rig.worker.release()
    await rig.worker.resume()
    assert summary_of(await rig.until_ended({"s"}), "s").num_tokens == 40


@pytest.mark.parametrize("policy", [UpdatePolicy.ABORT, UpdatePolicy.RECOMPUTE])
async def test_a_running_score_does_not_hold_up_an_update_while_paused(rig: Rig, policy: UpdatePolicy) -> None:
    """It is scored again, whole, under the new weights."""
    async with StepGate(rig.thread, 2) as gate:
        await rig.worker.submit_scores(["x"], [LONG], ScoreOptions())
        await gate.reached()
        pause = await queued(rig.thread, rig.worker.pause())
        gate.open()
        await soon(pause)
    await asyncio.wait_for(rig.update(1, 5, policy), 5)
    await rig.worker.resume()
    (event,) = await rig.until_ended({"x"})
    await rig.worker.submit_scores(["y"], [LONG], ScoreOptions())
    (again,) = await rig.until_ended({"y"})
    assert isinstance(event, ScoreEvent) and isinstance(again, ScoreEvent)
    assert (event.weight_version, again.weight_version) == (5, 5)
    assert event.score.logprobs.tobytes() == again.score.logprobs.tobytes()
    await rig.update(2, 6, policy)
    await rig.worker.submit_scores(["z"], [LONG], ScoreOptions())
    (other,) = await rig.until_ended({"z"})
    assert isinstance(other, ScoreEvent)
    assert other.score.logprobs.tobytes() != again.score.logprobs.tobytes(), "control: other weights"


# ---- updates ----------------------------------------------------------------------------------------------------


async def test_phases_out_of_order_are_refused(rig: Rig) -> None:
    with pytest.raises(WeightUpdateError, match="no update is staged"):
        await rig.worker.stage_chunks([])
    with pytest.raises(WeightUpdateError, match="no update is staged"):
        await rig.worker.verify_stage()
    await rig.stage(1, 1)
    with pytest.raises(WeightUpdateError, match="quiesced"):
        await rig.worker.commit()
    await rig.worker.quiesce(UpdatePolicy.WAIT)
    with pytest.raises(WeightUpdateError, match="verify"):
        await rig.worker.commit()
    await rig.worker.release()
    with pytest.raises(WeightUpdateError, match="no update is staged"):
        await rig.worker.verify_stage()
    assert (await rig.worker.info()).weights.version == 0
    await rig.update(1, 1, UpdatePolicy.WAIT)
    assert (await rig.worker.info()).weights.version == 1, "control: in order it works"


async def test_release_lets_the_waiting_in_again(rig: Rig) -> None:
    await rig.worker.quiesce(UpdatePolicy.WAIT)
    await rig.submit("s", max_tokens=3)
    await loop_turns(rig.thread)
    assert rig.thread.engine.num_waiting == 1
    await rig.worker.release()
    assert summary_of(await rig.until_ended({"s"}), "s").num_tokens == 3


# ---- callers that leave -----------------------------------------------------------------------------------------


async def test_a_caller_that_leaves_does_not_break_the_engine(rig: Rig) -> None:
    """Its command is still queued when its task is cancelled."""
    async with StepGate(rig.thread, 3) as gate:
        await rig.submit("s", max_tokens=10)
        await gate.reached()
        task = await queued(rig.thread, rig.submit("t"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.open()
    events = await rig.until_ended({"s"})
    assert rig.thread.broken is None
    assert summary_of(events, "s").num_tokens == 10


async def test_an_update_whose_sender_leaves_while_it_waits(rig: Rig) -> None:
    async with StepGate(rig.thread, 3) as gate:
        await rig.submit("s", max_tokens=10)
        await gate.reached()
        task = await queued(rig.thread, rig.worker.quiesce(UpdatePolicy.WAIT))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.open()
    assert summary_of(await rig.until_ended({"s"}), "s").num_tokens == 10
    await rig.worker.release()
    assert rig.thread.broken is None
    await rig.submit("t", max_tokens=4)
    assert summary_of(await rig.until_ended({"t"}), "t").num_tokens == 4


# ---- the end ----------------------------------------------------------------------------------------------------


async def test_a_broken_step_answers_everyone_and_refuses_the_rest(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.worker.pause()
    await rig.submit("s")
    await rig.worker.submit_scores(["x"], [LONG], ScoreOptions())

    def explode() -> list[Event]:
        raise RuntimeError("a kernel fault")

    monkeypatch.setattr(rig.thread.engine, "step", explode)
    await rig.worker.resume()
    events = await rig.until_ended({"s", "x"})
    assert [type(e) for e in events] == [FailureEvent, FailureEvent]
    with pytest.raises(ReplicaUnavailable, match="w failed"):
        await rig.submit("t")
    with pytest.raises(ReplicaUnavailable, match="broken"):
        await rig.worker.next_events(0.01)
    assert not (await rig.worker.load()).healthy
    assert "a kernel fault" in caplog.text


async def test_after_shutdown_calls_are_refused(tiny_qwen3_path: Path) -> None:
    rig = Rig(tiny_qwen3_path)
    await rig.worker.shutdown()
    with pytest.raises(ReplicaUnavailable, match="shutting down"):
        await rig.worker.pause()
    assert not rig.thread._thread.is_alive()
    assert await soon(rig.worker.next_events(WATCH := 60.0)) == [], f"a reader is woken, not left for {WATCH} s"


def test_tokenizer_of_a_folder(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    assert load_tokenizer(tiny_settings(tiny_qwen3_path), tiny_qwen3_path) is None
    words = word_tokenizer(tmp_path / "words")
    loaded = load_tokenizer(tiny_settings(tiny_qwen3_path, tokenizer=words), tiny_qwen3_path)
    assert loaded is not None and loaded.encode("w3 w4") == (3, 4)
    with pytest.raises(NotFound, match="tokenizer"):
        load_tokenizer(tiny_settings(tiny_qwen3_path, tokenizer=tmp_path), tiny_qwen3_path)
