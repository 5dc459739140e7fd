"""Admission: open, parked, refusing; and waiting until nobody is inside."""

from __future__ import annotations

import asyncio

from trainer_bridge.verl.gate import Gate, GateState


async def test_open_parked_and_open_again() -> None:
    gate = Gate()
    async with gate.enter("a") as admitted:
        assert admitted and gate.inside == {"a"}
    assert gate.inside == set()
    await gate.set(GateState.PARKED)
    entered = asyncio.Event()

    async def late() -> bool:
        async with gate.enter("b") as admitted:
            entered.set()
            return admitted

    task = asyncio.create_task(late())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not entered.is_set() and gate.inside == set()
    await gate.set(GateState.OPEN)
    assert await asyncio.wait_for(task, 5)


async def test_refusing_answers_those_that_wait_too() -> None:
    gate = Gate()
    await gate.set(GateState.PARKED)

    async def one() -> bool:
        async with gate.enter("a") as admitted:
            return admitted

    task = asyncio.create_task(one())
    await asyncio.sleep(0)
    await gate.set(GateState.REFUSING)
    assert await asyncio.wait_for(task, 5) is False
    assert await one() is False and gate.inside == set()


async def test_wait_empty() -> None:
    gate = Gate()
    leave = asyncio.Event()

    async def inside() -> None:
        async with gate.enter("a"):
            await leave.wait()

    task = asyncio.create_task(inside())
    await asyncio.sleep(0)
    assert not await gate.wait_empty(0.001)
    leave.set()
    assert await gate.wait_empty(5)
    await task


async def test_a_failure_inside_frees_the_place() -> None:
    gate = Gate()
    try:
        async with gate.enter("a"):
            raise ValueError
    except ValueError:
        pass
    assert gate.inside == set()
