"""Prompt log-probs between engine and client: first of all, once, and never of other weights than the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.errors import ReplicaUnavailable
from rollout.outbox import Outbox
from rollout.types import PromptChunk, SampleEvent, SampleSummary, TokenChunk
from tests.rollout.test_router import Rig, chunk, delivered, end, rig, settle
from tests.services import soon

__all__ = ["rig"]  # a fixture


def prompt(version: int = 1) -> PromptChunk:
    return PromptChunk(1, np.array([-1, -2], np.float32), version)


def first_token(name: str, version: int = 1) -> SampleEvent:
    """As the engine says it: the prompt together with the first token."""
    event = chunk(name, 0, 1, version=version)
    return SampleEvent(name, event.chunk, None, prompt(version))


def test_the_outbox_puts_it_before_the_tokens() -> None:
    outbox = Outbox()
    outbox.put([chunk("b", 0, 1), first_token("a"), chunk("a", 1, 1), end("a", 2)])
    mine = [event for event in outbox.take(0) if event.sample_id == "a" and isinstance(event, SampleEvent)]
    assert [(e.prompt is not None, e.chunk is not None, e.summary is not None) for e in mine] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert mine[1].chunk is not None and len(mine[1].chunk.token_ids) == 2


@pytest.mark.parametrize("tokens", [1, 4])
async def test_a_replay_tells_it_no_second_time(rig: Rig, tokens: int) -> None:
    (sample,) = await rig.submit("s")
    rig.a.emit(first_token("s"), *[chunk("s", i, 1) for i in range(1, tokens)])
    rig.a.die()
    await soon(rig.b.made["submit"].wait())
    rig.b.emit(first_token("s"), *[chunk("s", i, 1) for i in range(1, 6)], end("s", 6))
    items = await delivered(sample)
    assert [type(item) for item in items] == [PromptChunk] + [TokenChunk] * 6 + [SampleSummary]


async def test_it_comes_from_the_second_replica_when_the_first_had_not_told_it(rig: Rig) -> None:
    (sample,) = await rig.submit("s")
    rig.a.die()
    await soon(rig.b.made["submit"].wait())
    rig.b.emit(first_token("s"), end("s", 1))
    assert isinstance((await delivered(sample))[0], PromptChunk)


@pytest.mark.parametrize("late", [False, True])
async def test_a_replay_under_other_weights_fails(rig: Rig, late: bool) -> None:
    """The prompt was told under version 1; the replica that goes on serves version 2, or gets it on the way."""
    (sample,) = await rig.submit("s")
    rig.a.emit(SampleEvent("s", prompt=prompt()))
    await soon(sample.queue.get())
    rig.b.version = 1 if late else 2
    rig.a.die()
    if late:
        await soon(rig.b.made["submit"].wait())
        rig.b.emit(first_token("s", version=2))
    assert isinstance((await delivered(sample))[-1], ReplicaUnavailable)
    await settle()
    assert rig.router.num_live == 0
