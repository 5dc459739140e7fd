"""Many calls to one service: bounded, patient where it is full, cancelled as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from rollout.config import load_settings
from rollout.errors import CapacityExceeded, InvalidRequest
from rollout.types import SamplingParams
from tests.services import soon, tiny_service
from trainer_bridge.replay import replay_records
from trainer_bridge.room import SAMPLES_UNDER_WAY, gather_in_room
from trainer_bridge.single_use import generate_rollouts


class Full:
    """A service that holds ``most`` calls; counts."""

    def __init__(self, most: int) -> None:
        self.most, self.now, self.peak, self.refused, self.asked = most, 0, 0, 0, 0

    async def call(self, i: int) -> int:
        self.asked += 1
        if self.now >= self.most:
            self.refused += 1
            raise CapacityExceeded("full")
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            return i
        finally:
            self.now -= 1


def calls(full: Full, count: int) -> list[Callable[[], Awaitable[int]]]:
    return [partial(full.call, i) for i in range(count)]


async def test_every_call_is_answered_in_order_however_little_room_there_is() -> None:
    full = Full(3)
    assert await soon(gather_in_room(calls(full, 100))) == list(range(100))
    assert full.peak == 3 and full.refused > 0


async def test_no_more_samples_are_under_way_than_that() -> None:
    wide = Full(10_000)
    await soon(gather_in_room(calls(wide, 50), samples_each=SAMPLES_UNDER_WAY // 4))
    assert wide.peak == 4 and not wide.refused
    one = Full(10_000)
    await soon(gather_in_room(calls(one, 5), samples_each=SAMPLES_UNDER_WAY * 3))
    assert one.peak == 1


async def test_a_service_that_stays_full_is_given_up() -> None:
    full = Full(0)
    with pytest.raises(CapacityExceeded):
        await soon(gather_in_room(calls(full, 4), patience_s=0.2))
    assert full.asked >= 4 * 2


async def test_the_first_failure_cancels_the_rest() -> None:
    ended: list[str] = []

    async def bad() -> int:
        raise InvalidRequest("no")

    async def forever() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        return 0

    with pytest.raises(InvalidRequest, match="no"):
        await soon(gather_in_room([forever, bad, forever]))
    assert ended == ["cancelled"] * 2


async def test_k1_prompts_beyond_the_room_and_beside_anothers_of_the_same_name(tiny_qwen3_path: Path) -> None:
    """60 samples through a service that holds 12, while others hold the names prompt0 and replay0 there."""
    settings = load_settings(None, [f"model.path={tiny_qwen3_path}"])
    async with tiny_service(tiny_qwen3_path, max_running=8, max_waiting=4) as (service, client):
        begun = asyncio.Event()

        async def hold(name: str) -> None:
            async for _ in client.stream((9,), SamplingParams(max_tokens=400, ignore_eos=True), request_id=name):
                begun.set()

        others = [asyncio.create_task(hold(name)) for name in ("prompt0", "replay0")]
        await soon(begun.wait())
        prompts = [(3 + i, 4) for i in range(20)]
        sampling = SamplingParams(seed=5, max_tokens=4, ignore_eos=True)
        made = await soon(
            generate_rollouts(prompts, sampling, n=3, digests=False, address=service.address, settings=settings)
        )
        records = [record for record, _ in made]
        assert [r.request_id for r in records] == [f"prompt{i}" for i in range(20) for _ in range(3)]
        assert [r.seed for r in records] == [5 + i for i in range(20) for _ in range(3)]
        again = await soon(replay_records(records, service.address))
        assert all(one.equal for one in again) and len(again) == 60
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
