"""Health by progress: deadlines on a worker's answers and on one step of its engine."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from rollout import watch as watching
from rollout.config import Settings
from rollout.engine_thread import EngineThread
from rollout.errors import ReplicaUnavailable
from rollout.serving import running_service
from rollout.types import SampleSummary, WeightState
from rollout.watch import ProgressLimits, progress_limits
from tests.rollout.replicas import Rig, chunk, delivered, end
from tests.services import (
    StepGate,
    bits,
    engine_bits,
    engine_threads,
    make_engine,
    mixed_requests,
    soon,
    tiny_settings,
)
from trainer_bridge.aio_client import AsyncRolloutClient

QUICK = ProgressLimits(interval_s=0.01, answer_s=0.2, step_s=5.0)


@pytest.fixture
async def rig() -> Any:
    rig = Rig(QUICK)
    rig.router.start()
    yield rig
    await rig.router.stop()


async def left(rig: Rig, name: str) -> str:
    """The reason, once the replica has left rotation."""
    slot = rig.router.slot(name)
    assert slot is not None
    while slot.alive:
        await asyncio.sleep(0.01)
    return slot.reason


async def test_a_worker_that_does_not_answer_leaves(rig: Rig) -> None:
    """Stopped, or cut off: the connection lives and nothing comes. Its late answers reach nobody."""
    (sample,) = await rig.submit("s")
    rig.a.emit(chunk("s", 0, 2))
    await soon(sample.queue.get())
    rig.a.answers["busy_s"] = asyncio.Event()
    assert "worker.answer_timeout_s" in await soon(left(rig, "a"))
    await soon(rig.b.made["submit"].wait())
    rig.a.emit(chunk("s", 2, 5, salt=9), end("s", 7))
    rig.b.emit(chunk("s", 2, 1), end("s", 3))
    items = await delivered(sample)
    assert items[0].token_ids.tolist() == [4] and isinstance(items[-1], SampleSummary) and items[-1].num_tokens == 3
    slot = rig.router.slot("b")
    assert slot is not None and slot.alive, "control"


async def test_a_step_that_does_not_end_is_a_hang(rig: Rig) -> None:
    rig.b.answers["busy_s"] = 4.9
    await rig.b.made["busy_s"].wait()
    rig.a.answers["busy_s"] = 5.1
    assert "worker.step_timeout_s" in await soon(left(rig, "a"))
    slot = rig.router.slot("b")
    assert slot is not None and slot.alive, "control: long, and within the limit"


async def test_a_call_ends_when_its_worker_leaves(rig: Rig) -> None:
    """Whoever waits for a worker that hangs gets an error; no call has to guess how long it may take."""
    rig.a.answers["quiesce"] = rig.b.answers["quiesce"] = asyncio.Event()
    waiting = asyncio.ensure_future(rig.router.all("quiesce"))
    await rig.a.made["quiesce"].wait()
    assert not waiting.done(), "control"
    rig.router.fence("a", ReplicaUnavailable("hangs"))
    rig.router.fence("b", ReplicaUnavailable("hangs"))
    with pytest.raises(ReplicaUnavailable, match="left rotation: hangs"):
        await soon(waiting)


async def test_a_gateway_that_stood_still_blames_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop was held longer than the deadline; the answer has been there all the time."""
    looks: list[float] = []
    wait = asyncio.wait

    async def late(calls: Any, *, timeout: float | None = None, **options: Any) -> Any:
        if timeout is None:
            return await wait(calls, timeout=timeout, **options)
        looks.append(timeout)
        # What a loop finds that was stopped: time is over, and nothing was looked at.
        return (set(), set(calls)) if len(looks) == 1 else await wait(calls, timeout=timeout, **options)

    monkeypatch.setattr(watching.asyncio, "wait", late)
    while len(looks) < 3:
        await asyncio.sleep(0.01)
    assert all(slot.alive for slot in rig.router.slots())


def test_limits_come_from_the_settings() -> None:
    settings = Settings.model_validate({"worker": {"answer_timeout_s": 2, "step_timeout_s": 8}})
    assert progress_limits(settings) == ProgressLimits(interval_s=0.5, answer_s=2.0, step_s=8.0)


async def test_an_engine_that_hangs_in_a_step(tiny_qwen3_path: Path) -> None:
    """A real engine, held inside its loop: its samples go on elsewhere with the same bits."""
    settings = tiny_settings(tiny_qwen3_path, replicas=2)
    settings = settings.model_copy(update={"worker": settings.worker.model_copy(update={"step_timeout_s": 2.0})})
    requests = mixed_requests(4)
    expected = engine_bits(settings, requests)
    async with running_service(settings, in_process=True) as service, AsyncRolloutClient(service.address) as client:
        assert [bits(r) for r in await client.generate_many(requests)] == expected
        first, _ = engine_threads(service)
        async with StepGate(first, 3) as gate:
            tasks = [asyncio.ensure_future(client.generate_many([r])) for r in requests]
            await gate.reached()
            assert (await client.info()).replicas[0].healthy, "control: it answers, and has not been in a step for long"
            results = [r for (r,) in await soon(asyncio.gather(*tasks))]
        assert [bits(r) for r in results] == expected
        assert [r.healthy for r in (await client.info()).replicas] == [False, True]


def test_busy_says_how_long_a_turn_takes(tiny_qwen3_path: Path) -> None:
    thread = EngineThread(make_engine(tiny_settings(tiny_qwen3_path)), WeightState(0, ""), threads=1)
    thread.start()
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go.wait(20)

    done = thread.call(hold)
    assert entered.wait(20)
    before = thread.busy_s
    assert thread.busy_s >= before > 0
    go.set()
    done.result(20)
    thread.stop()
    assert thread.busy_s == 0.0
