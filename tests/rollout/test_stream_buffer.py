"""Order, accounting, and who pays when readers are slow."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.call_scope import call_scope
from rollout.errors import RequestAborted
from rollout.server_settings import RequestLimits
from rollout.stream_buffer import EVENT_BYTES, GRACE_S, StreamBuffer, StreamBuffers, event_bytes
from rollout.types import PromptChunk, TokenChunk, TopLogprobs

LIMITS = RequestLimits(stream_buffer_bytes=100_000, stream_buffers_bytes=250_000)


def chunk(offset: int, tokens: int = 10) -> TokenChunk:
    ids, logprobs = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
    return TokenChunk(0, offset, ids, logprobs, logprobs, 1)


def test_what_an_event_takes_up() -> None:
    top = TopLogprobs(np.zeros((10, 4), np.int32), np.zeros((10, 4), np.float32))
    one = TokenChunk(0, 0, *(np.zeros(10, np.float32),) * 3, 1, np.zeros(10, np.uint64), top)  # type: ignore[arg-type]
    assert event_bytes(one) == EVENT_BYTES + 120 + 80 + 320
    assert event_bytes(PromptChunk(1, np.zeros(10, np.float32), 1)) == EVENT_BYTES + 40
    assert event_bytes("an end") == EVENT_BYTES


async def test_a_reader_gets_everything_in_order_and_waits_for_more() -> None:
    buffers = StreamBuffers(LIMITS)
    buffer = buffers.open()
    reader = asyncio.create_task(_read(buffer, 30))
    for i in range(30):
        buffer.put_nowait(chunk(i))
        if i % 7 == 0:
            await asyncio.sleep(0)
    assert [c.offset for c in await reader] == list(range(30))
    assert buffers.waiting_bytes == buffer.waiting_bytes == 0


async def _read(buffer: StreamBuffer, count: int) -> list[Any]:
    return [await buffer.get() for _ in range(count)]


async def test_a_reader_too_far_behind_is_told_and_its_memory_freed() -> None:
    buffers = StreamBuffers(LIMITS, grace_s=0)
    slow, fast = buffers.open(), buffers.open()
    fast.put_nowait(chunk(0))
    for i in range(400):
        slow.put_nowait(chunk(i))
    with pytest.raises(RequestAborted, match=r"server\.stream_buffer_bytes"):
        raise await slow.get()
    assert slow.waiting_bytes == 0 and buffers.waiting_bytes == fast.waiting_bytes
    assert (await fast.get()).offset == 0, "nobody else is touched"


class Hand:
    """The loop's clock, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = asyncio.get_running_loop().time()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


async def test_a_burst_of_any_size_is_no_debt_until_its_grace_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 samples of 64 tokens: 850,000 bytes at once for a reader that had read everything."""
    hand, buffers = Hand(monkeypatch), StreamBuffers(RequestLimits(stream_buffer_bytes=65536))
    buffer = buffers.open()
    for burst in range(5):
        for sample in range(256):
            buffer.put_nowait(chunk(sample, 64))
        assert buffer.waiting_bytes > 256 * 64 * 12 and buffer.behind_bytes == 0
        hand.now += GRACE_S - 0.01
        if burst < 4:
            assert [(await buffer.get()).offset for _ in range(256)] == list(range(256))
    # The last burst is not read: a second after it came it counts.
    hand.now += 0.02
    assert buffer.behind_bytes == buffer.waiting_bytes
    buffer.put_nowait(chunk(0, 1))
    with pytest.raises(RequestAborted, match=r"bytes behind, the limit is 65536 \(server\.stream_buffer_bytes\)"):
        raise await buffer.get()
    assert buffers.waiting_bytes == 0


async def test_a_reader_that_takes_less_than_comes_is_ended_however_evenly_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Puts closer together than marks: the oldest counts all the same, and never more than one second is let off."""
    hand, buffers = Hand(monkeypatch), StreamBuffers(RequestLimits(stream_buffer_bytes=65536))
    buffer, size = buffers.open(), event_bytes(chunk(0))
    for step in range(10_000):
        hand.now += 0.001
        buffer.put_nowait(chunk(step))
        assert len(buffer._marks) < 20
        assert buffer.waiting_bytes <= 65536 + 1100 * size
        if buffer._ended:
            break
        if step % 2:
            await buffer.get()
    assert isinstance(await buffer.get(), RequestAborted)


async def test_a_debt_is_seen_although_nothing_more_comes() -> None:
    buffers = StreamBuffers(LIMITS, grace_s=0.01)
    stuck = buffers.open()
    stuck.put_nowait(chunk(0, 20_000))
    assert stuck.waiting_bytes > LIMITS.stream_buffer_bytes
    async with asyncio.timeout(20):
        while stuck.waiting_bytes:
            await asyncio.sleep(0)
    assert isinstance(await stuck.get(), RequestAborted)


async def test_of_all_together_whoever_holds_most_pays() -> None:
    buffers = StreamBuffers(LIMITS)
    small, large, grown = (buffers.open() for _ in range(3))
    small.put_nowait(chunk(0, 6_000))
    large.put_nowait(chunk(0, 8_000))
    for _ in range(3):
        grown.put_nowait(chunk(0, 2_500))
    assert isinstance(await large.get(), RequestAborted)
    assert isinstance(await small.get(), TokenChunk) and isinstance(await grown.get(), TokenChunk)


async def test_the_call_that_does_not_read_is_ended() -> None:
    """It is stuck in a write: the error is raised there."""
    buffers = StreamBuffers(LIMITS, grace_s=0)

    async def serve() -> None:
        with call_scope() as scope:
            buffer = buffers.open()
            try:
                async with asyncio.timeout(60) as scope.deadline:
                    opened.set_result(buffer)
                    await asyncio.Event().wait()
            except TimeoutError:
                assert scope.end_reason is not None
                raise scope.end_reason from None
            finally:
                buffer.close()

    opened: asyncio.Future[StreamBuffer] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve())
    buffer = await opened
    for i in range(400):
        buffer.put_nowait(chunk(i))
    with pytest.raises(RequestAborted, match="behind"):
        await asyncio.wait_for(task, 20)
    assert buffers.waiting_bytes == 0


async def test_after_the_end_nothing_is_kept() -> None:
    buffers = StreamBuffers(LIMITS)
    buffer = buffers.open()
    buffer.put_nowait(chunk(0))
    buffer.close()
    buffer.put_nowait(chunk(1))
    buffer.close()
    assert buffers.waiting_bytes == buffer.waiting_bytes == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 12_000)), max_size=80))
def test_the_books_balance_whatever_comes(moves: list[tuple[int, int]]) -> None:
    """-1: the reader takes one; else a chunk of so many tokens comes."""

    async def play() -> None:
        buffers = StreamBuffers(LIMITS, grace_s=0)
        opened = [buffers.open() for _ in range(4)]
        for which, tokens in moves:
            buffer = opened[which]
            if tokens >= 0:
                buffer.put_nowait(chunk(0, tokens))
            elif buffer._events:
                await buffer.get()
            assert all(0 <= b.waiting_bytes <= LIMITS.stream_buffer_bytes for b in opened)
            assert buffers.waiting_bytes == sum(b.waiting_bytes for b in opened) <= LIMITS.stream_buffers_bytes
            assert all(b.waiting_bytes == sum(size for _, size in b._events) for b in opened)

    asyncio.run(play())
