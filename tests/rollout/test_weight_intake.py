"""What an update holds while it runs, and what its stream may say."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from rollout.config import WeightSettings
from rollout.errors import InvalidRequest, ReplicaUnavailable, WeightUpdateError
from rollout.types import TensorChunk, UpdateEnd, UpdatePart, WeightState, WeightUpdate
from rollout.weight_intake import Intake
from rollout.weight_updates import commit_all, stage_all

SIZE = 4096


class FakeRouter:
    """Looks at each bucket for some turns of the loop and then forgets it."""

    def __init__(self, *, fail_at: int = -1) -> None:
        self.buckets: list[int] = []
        self._fail_at = fail_at

    async def share(self, bucket: list[TensorChunk]) -> list[TensorChunk]:
        return bucket

    async def all(self, method: str, bucket: list[TensorChunk]) -> None:
        assert method == "stage_chunks"
        for _ in range(5):
            await asyncio.sleep(0)
        self.buckets.append(sum(len(c.data) for c in bucket))
        if len(self.buckets) == self._fail_at:
            raise WeightUpdateError("refused")


class Counted:
    """Chunks whose arrays are counted while anybody holds them."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.alive = self.most = self.made = 0

    async def parts(self) -> AsyncGenerator[UpdatePart, None]:
        for i in range(self.count):
            yield self._chunk(i)
        yield UpdateEnd("ab")

    def _chunk(self, number: int) -> TensorChunk:
        data = np.zeros(self.size, np.uint8)
        weakref.finalize(data, self._gone)
        self.made += 1
        self.alive += 1
        self.most = max(self.most, self.alive)
        return TensorChunk(str(number), "int32", (self.size // 4,), 0, data)

    def _gone(self) -> None:
        self.alive -= 1


def intake(parts: AsyncIterator[UpdatePart], **head: Any) -> Intake:
    update = WeightUpdate(1, head.pop("digest", ""), 1, **head)
    return Intake(update, parts, WeightSettings(bucket_bytes=SIZE, idle_s=5, root=None), "none")


@pytest.mark.parametrize("size", [SIZE // 4, SIZE])
async def test_two_buckets_at_most_are_on_their_way(size: int) -> None:
    """However long the stream: one that is being staged, one that comes in, and the chunk in hand."""
    counted, router = Counted(100, size), FakeRouter()
    router_: Any = router
    assert await stage_all(router_, intake(counted.parts())) == "ab"
    assert sum(router.buckets) == 100 * size and max(router.buckets) == SIZE
    assert counted.most * size // SIZE >= 2 and counted.most <= 2 * (SIZE // size) + 1
    assert counted.alive == 0


async def test_a_replica_that_refuses_ends_the_stream_early() -> None:
    counted = Counted(100, SIZE)
    router: Any = FakeRouter(fail_at=3)
    with pytest.raises(WeightUpdateError, match="refused"):
        await stage_all(router, intake(counted.parts()))
    assert counted.made <= 5, "nobody reads the rest for nothing"


async def test_a_cancelled_update_leaves_no_task_behind() -> None:
    counted = Counted(10_000, SIZE)
    router: Any = FakeRouter()
    async with aclosing(counted.parts()) as parts:
        task = asyncio.ensure_future(stage_all(router, intake(parts)))
        while counted.made < 5:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def parts_of(*parts: UpdatePart) -> AsyncIterator[UpdatePart]:
    for part in parts:
        yield part


CHUNK = TensorChunk("a", "int32", (1,), 0, b"\0\0\0\0")


@pytest.mark.parametrize(
    ("parts", "head", "words"),
    [
        ((CHUNK,), {}, "ended without a digest"),
        ((CHUNK, UpdateEnd("ab"), CHUNK), {}, "after its end"),
        ((CHUNK, UpdateEnd("ab"), UpdateEnd("ab")), {}, "after its end"),
        ((CHUNK, UpdateEnd("ab")), {"digest": "cd"}, "begin had a digest already"),
        ((CHUNK,), {"digest": "cd", "folder": "x"}, "came over the stream as well"),
    ],
)
async def test_streams_out_of_order(parts: tuple[UpdatePart, ...], head: dict[str, Any], words: str) -> None:
    router: Any = FakeRouter()
    with pytest.raises(InvalidRequest, match=words):
        await stage_all(router, intake(parts_of(*parts), **head))
    assert await stage_all(router, intake(parts_of(CHUNK, UpdateEnd("ab")))) == "ab"
    assert await stage_all(router, intake(parts_of(CHUNK), digest="cd")) == "cd"


# ---- the commit -------------------------------------------------------------------------------------------------


class Committing:
    """A router whose replicas commit as told."""

    def __init__(self, **outcomes: Any) -> None:
        self._outcomes = outcomes
        self.fenced: list[str] = []

    async def all_outcomes(self, method: str) -> dict[str, Any]:
        assert method == "commit"
        return self._outcomes

    def fence(self, name: str, error: Exception) -> None:
        assert isinstance(error, ReplicaUnavailable)
        self.fenced.append(name)


GOOD, OTHER, BAD = WeightState(1, "ab"), WeightState(1, "cd"), RuntimeError("disk")


def said(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == level]


async def test_who_commits_and_who_leaves(caplog: pytest.LogCaptureFixture) -> None:
    router: Any = Committing(a=GOOD, b=BAD, c=GOOD)
    with caplog.at_level("INFO", "rollout.weight_updates"):
        assert await commit_all(router, WeightUpdate(1, "ab", 3)) == GOOD
    assert router.fenced == ["b"]
    (line,) = said(caplog, "INFO")
    assert said(caplog, "ERROR") == ["worker b failed to commit: disk"]
    assert "weights version 1, digest ab, 3 tensors from the stream, policy wait" in line


@pytest.mark.parametrize("outcomes", [{"a": BAD, "b": BAD}, {"a": GOOD, "b": OTHER}])
async def test_where_none_or_not_one_set_is_held_nobody_stays(
    outcomes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    router: Any = Committing(**outcomes)
    with caplog.at_level("INFO", "rollout.weight_updates"), pytest.raises(ReplicaUnavailable, match="on no replica"):
        await commit_all(router, WeightUpdate(1, "ab", 3))
    assert router.fenced == ["a", "b"] and not said(caplog, "INFO"), "no audit line without a commit"
