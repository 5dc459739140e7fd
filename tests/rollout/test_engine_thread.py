"""Commands between steps, pausing, and the phases of a weight update on a live engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from rollout.engine import Engine
from rollout.engine_thread import EngineThread
from rollout.errors import ParityError, ReplicaUnavailable, WeightUpdateError
from rollout.events import Event, FailureEvent
from rollout.types import (
    FinishReason,
    SampleEvent,
    SampleSummary,
    ScoreSequence,
    UpdatePolicy,
    WeightState,
    WeightUpdate,
)
from rollout.weights import model_digest
from tests.engines import Generated, Record, build_engine, fresh_model, isolated, sample
from tests.rollout.updates import chunks_of, digest_over

LIMIT_S = 30
LONG = 1500


@pytest.fixture
def thread(tiny_qwen3_path: Path) -> Iterator[EngineThread]:
    """A running thread over an engine of its own."""
    model = fresh_model(tiny_qwen3_path, torch.float32)
    owner = EngineThread(build_engine(model), WeightState(0, model_digest(model)), threads=1)
    owner.start()
    yield owner
    owner.stop(LIMIT_S)
    assert not owner._thread.is_alive()


def add(thread: EngineThread, prompt: tuple[int, ...] = (2, 3, 4), name: str = "s", tokens: int = 8) -> None:
    request = thread.engine.effective_request(sample(prompt, name, max_tokens=tokens))
    thread.call(lambda: thread.engine.add(request)).result(LIMIT_S)


def read_until_end(thread: EngineThread, names: set[str], record: Record | None = None) -> dict[str, Generated]:
    record = record or Record()
    while not all(name in record.samples and record.samples[name].ended for name in names):
        events = thread.outbox.take(LIMIT_S)
        assert events, f"nothing more came; so far {sorted(record.samples)}"
        record.take(events)
    return record.samples


def some_tokens(thread: EngineThread) -> Record:
    """Wait until the engine has sampled something."""
    record = Record()
    record.take(thread.outbox.take(LIMIT_S))
    return record


def stage(thread: EngineThread, version: int, scale: float) -> dict[str, torch.Tensor]:
    tensors = {n: (p.detach() * scale).clone() for n, p in thread.engine.model.parameters()}
    thread.stage(WeightUpdate(version, digest_over(tensors), len(tensors)))
    thread.stage_chunks(list(chunks_of(tensors)))
    thread.verify_stage()
    return tensors


def test_serves_what_an_engine_of_its_own_says(thread: EngineThread) -> None:
    alone = {n: isolated(thread.engine.model, sample(p, n)) for n, p in (("a", (2, 3, 4)), ("b", (9,) * 70))}
    add(thread, (2, 3, 4), "a", 12)
    add(thread, (9,) * 70, "b", 12)
    samples = read_until_end(thread, {"a", "b"})
    assert {n: samples[n].bits() for n in "ab"} == {n: alone[n].bits() for n in "ab"}
    assert samples["a"].bits() != samples["b"].bits()


def test_a_failing_command_fails_alone(thread: EngineThread) -> None:
    def fail() -> None:
        raise ParityError("told")

    with pytest.raises(ParityError, match="told"):
        thread.call(fail).result(LIMIT_S)
    assert thread.call(threading.get_ident).result(LIMIT_S) == thread._thread.ident
    assert thread.broken is None


def test_a_caller_that_gives_up_does_not_end_the_engine(tiny_qwen3_path: Path) -> None:
    """asyncio.wrap_future cancels the future of a command when its task is cancelled (client gone, deadline)."""
    model = fresh_model(tiny_qwen3_path, torch.float32)
    thread = EngineThread(build_engine(model), WeightState(0, ""), threads=1)
    gate = threading.Event()
    first = thread.call(gate.wait)
    cancelled = thread.call(lambda: None)
    assert cancelled.cancel()
    after = thread.call(lambda: 7)
    thread.start()
    gate.set()
    try:
        assert first.result(LIMIT_S) and after.result(LIMIT_S) == 7
        assert thread.broken is None
    finally:
        thread.stop(LIMIT_S)


def test_no_step_between_pause_and_resume(thread: EngineThread) -> None:
    add(thread, tokens=LONG)
    record = some_tokens(thread)
    thread.pause().result(LIMIT_S)
    record.take(thread.outbox.take(0))
    length = len(record.samples["s"].token_ids)
    for _ in range(50):
        thread.call(lambda: None).result(LIMIT_S)
    assert thread.outbox.take(0) == []
    thread.resume().result(LIMIT_S)
    record.take(thread.outbox.take(LIMIT_S))
    assert len(record.samples["s"].token_ids) > length


def test_a_failing_step_answers_everyone_and_fences(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    thread.pause().result(LIMIT_S)
    add(thread, name="a")
    add(thread, name="b")

    def fail() -> list[Event]:
        raise ArithmeticError("kernel fault")

    monkeypatch.setattr(thread.engine, "step", fail)
    thread.resume().result(LIMIT_S)
    events = thread.outbox.take(LIMIT_S)
    assert {e.sample_id for e in events} == {"a", "b"}
    assert all(isinstance(e, FailureEvent) and isinstance(e.error, ReplicaUnavailable) for e in events)
    assert thread.broken is not None
    with pytest.raises(ReplicaUnavailable):
        thread.call(lambda: None).result(LIMIT_S)


def test_after_stop_commands_are_refused(tiny_qwen3_path: Path) -> None:
    model = fresh_model(tiny_qwen3_path, torch.float32)
    thread = EngineThread(build_engine(model), WeightState(0, ""), threads=1)
    thread.start()
    thread.stop(LIMIT_S)
    with pytest.raises(ReplicaUnavailable, match="shutting down"):
        thread.call(lambda: None).result(LIMIT_S)
    thread.stop(LIMIT_S)


# ---- updates ----------------------------------------------------------------------------------------------------


def finish(thread: EngineThread, policy: UpdatePolicy) -> WeightState:
    thread.quiesce(policy).result(LIMIT_S)
    state = thread.commit().result(LIMIT_S)
    thread.release().result(LIMIT_S)
    return state


def test_wait_lets_the_running_finish_under_the_old_weights(thread: EngineThread) -> None:
    old = isolated(thread.engine.model, sample((2, 3, 4), max_tokens=200))
    add(thread, tokens=200)
    record = some_tokens(thread)
    tensors = stage(thread, 5, 1.25)
    quiesced = thread.quiesce(UpdatePolicy.WAIT)
    add(thread, name="late")
    quiesced.result(LIMIT_S)
    assert thread.call(lambda: thread.engine.num_waiting).result(LIMIT_S) == 1
    state = thread.commit().result(LIMIT_S)
    assert state == WeightState(5, digest_over(tensors)) == thread.weights
    thread.release().result(LIMIT_S)
    samples = read_until_end(thread, {"s", "late"}, record)
    assert samples["s"].bits() == old.bits() and set(samples["s"].versions) == {0}
    assert set(samples["late"].versions) == {5}
    assert samples["late"].bits() == isolated(thread.engine.model, sample((2, 3, 4), max_tokens=8)).bits()
    assert samples["late"].bits()[1] != old.bits()[1][: 8 * 4]


def summary_of(one: Generated) -> SampleSummary:
    assert one.summary is not None
    return one.summary


def test_abort_returns_what_was_sampled(thread: EngineThread) -> None:
    add(thread, tokens=LONG)
    record = some_tokens(thread)
    stage(thread, 1, 1.25)
    finish(thread, UpdatePolicy.ABORT)
    one = read_until_end(thread, {"s"}, record)["s"]
    summary = summary_of(one)
    assert summary.finish.reason is FinishReason.ABORTED and summary.finish.message == "weight update"
    assert 0 < summary.num_tokens == len(one.token_ids) < LONG and set(one.versions) == {0}


def test_recompute_goes_on_under_the_new_weights(thread: EngineThread) -> None:
    """Every token re-scores under the version that its span names (G3)."""
    add(thread, tokens=LONG)
    record = some_tokens(thread)
    stage(thread, 7, 1.25)
    finish(thread, UpdatePolicy.RECOMPUTE)
    before = len(record.samples["s"].token_ids)
    while record.samples["s"].versions[before:].count(7) < 3:
        record.take(thread.outbox.take(LIMIT_S))
    thread.call(lambda: thread.outbox.put([thread.engine.abort("s", "enough")])).result(LIMIT_S)
    one = read_until_end(thread, {"s"}, record)["s"]
    spans = summary_of(one).spans
    assert [s.version for s in spans] == [0, 7] and spans[0].start == 0 and spans[1].end == len(one.token_ids)
    assert spans[0].end == spans[1].start == one.versions.index(7)
    # The first token under the new weights: what a fresh engine draws after the same ids at the same position.
    at = spans[1].start
    resumed = isolated(thread.engine.model, sample((2, 3, 4, *one.token_ids[:at]), max_tokens=3))
    assert resumed.token_ids == one.token_ids[at : at + 3]
    assert resumed.policy == one.policy[at : at + 3]


def test_a_withdrawn_update_changes_nothing(thread: EngineThread) -> None:
    before = thread.weights
    alone = isolated(thread.engine.model, sample((2, 3, 4), max_tokens=8))
    stage(thread, 3, 2.0)
    thread.quiesce(UpdatePolicy.WAIT).result(LIMIT_S)
    thread.release().result(LIMIT_S)
    assert thread.weights == before
    add(thread)
    assert read_until_end(thread, {"s"})["s"].bits() == alone.bits()
    with pytest.raises(WeightUpdateError, match="no update is staged"):
        thread.verify_stage()


def test_commit_needs_a_quiet_engine_and_a_stage(thread: EngineThread) -> None:
    stage(thread, 1, 1.0)
    with pytest.raises(WeightUpdateError, match="before the engine was quiesced"):
        thread.commit().result(LIMIT_S)
    thread.release().result(LIMIT_S)
    thread.quiesce(UpdatePolicy.WAIT).result(LIMIT_S)
    with pytest.raises(WeightUpdateError, match="no update is staged"):
        thread.commit().result(LIMIT_S)
    thread.release().result(LIMIT_S)


def test_waiting_for_paused_samples_is_refused(thread: EngineThread) -> None:
    add(thread, tokens=LONG)
    some_tokens(thread)
    thread.pause().result(LIMIT_S)
    stage(thread, 1, 1.0)
    with pytest.raises(WeightUpdateError, match="paused") as caught:
        thread.quiesce(UpdatePolicy.WAIT).result(LIMIT_S)
    assert caught.value.field == "begin.policy"
    finish(thread, UpdatePolicy.ABORT)


def test_a_drain_that_is_withdrawn_is_told(thread: EngineThread) -> None:
    add(thread, tokens=LONG)
    some_tokens(thread)
    stage(thread, 1, 1.0)
    waiting = thread.quiesce(UpdatePolicy.WAIT)
    thread.call(lambda: None).result(LIMIT_S)
    thread.release().result(LIMIT_S)
    with pytest.raises(WeightUpdateError, match="withdrawn"):
        waiting.result(LIMIT_S)


def answered(future: Future[None]) -> bool:
    """Whether a future is resolved once its thread has ended: nobody is left to resolve it later."""
    return future.done()


def test_a_drain_is_told_of_a_shutdown(tiny_qwen3_path: Path) -> None:
    thread, waiting = stopped_while_draining(tiny_qwen3_path)
    assert not thread._thread.is_alive()
    assert answered(waiting) and isinstance(waiting.exception(), ReplicaUnavailable)


def test_live_samples_are_answered_at_shutdown(tiny_qwen3_path: Path) -> None:
    thread, _ = stopped_while_draining(tiny_qwen3_path)
    events = thread.outbox.take(0)
    assert any(isinstance(e, FailureEvent) or (isinstance(e, SampleEvent) and e.summary) for e in events)


def stopped_while_draining(path: Path) -> tuple[EngineThread, Future[None]]:
    model = fresh_model(path, torch.float32)
    thread = EngineThread(build_engine(model), WeightState(0, ""), threads=1)
    thread.start()
    add(thread, tokens=LONG)
    waiting = thread.quiesce(UpdatePolicy.WAIT)
    thread.call(lambda: None).result(LIMIT_S)
    thread.stop(LIMIT_S)
    return thread, waiting


def test_abort_of_a_paused_engine_with_a_running_score(thread: EngineThread) -> None:
    thread.pause().result(LIMIT_S)

    def start_score(engine: Engine = thread.engine) -> None:
        engine.add_score("z", ScoreSequence((2,) * 200), temperature=1.0, want_digests=False)
        engine.scheduler.schedule()

    thread.call(start_score).result(LIMIT_S)
    waiting = thread.quiesce(UpdatePolicy.ABORT)
    thread.call(lambda: None).result(LIMIT_S)
    done = answered(waiting)
    thread.release().result(LIMIT_S)
    assert done, "the drain can never end: the score does not run while paused and is not aborted"


def test_wait_also_waits_for_a_preempted_sample(thread: EngineThread) -> None:
    """It ran before the update began, so it ends under the weights that it began with; what never ran does not."""
    add(thread, tokens=40)
    some = some_tokens(thread)
    thread.pause().result(LIMIT_S)

    def preempt(engine: Engine = thread.engine) -> int:
        engine.scheduler.preempt(engine.scheduler.running[0])
        return engine.num_running

    assert thread.call(preempt).result(LIMIT_S) == 1
    with pytest.raises(WeightUpdateError, match="1 running samples"):
        thread.quiesce(UpdatePolicy.WAIT).result(LIMIT_S)
    add(thread, name="later", tokens=4)
    stage(thread, 1, 1.2)
    thread.resume().result(LIMIT_S)
    thread.quiesce(UpdatePolicy.WAIT).result(LIMIT_S)
    thread.commit().result(LIMIT_S)
    thread.release().result(LIMIT_S)
    samples = read_until_end(thread, {"s", "later"}, some)
    assert set(samples["s"].versions) == {0} and len(samples["s"].token_ids) == 40


def test_abort_also_ends_a_preempted_sample(thread: EngineThread) -> None:
    add(thread, tokens=LONG)
    record = some_tokens(thread)
    thread.pause().result(LIMIT_S)
    thread.call(lambda: thread.engine.scheduler.preempt(thread.engine.scheduler.running[0])).result(LIMIT_S)
    thread.quiesce(UpdatePolicy.ABORT).result(LIMIT_S)
    one = read_until_end(thread, {"s"}, record)["s"]
    assert one.summary is not None and one.summary.finish.reason is FinishReason.ABORTED and one.token_ids
    thread.release().result(LIMIT_S)
