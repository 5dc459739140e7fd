"""The pool over replicas in this process: one answer for any number of them, updates on all or none, conservation."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.engine_thread import EngineThread
from rollout.errors import (
    InvalidRequest,
    NotFound,
    ParityError,
    ReplicaUnavailable,
    UnsupportedFeature,
    WeightUpdateError,
)
from rollout.pool import Pool
from rollout.replica import LocalReplica, Replica
from rollout.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    LogprobMode,
    SampleSummary,
    ScoreRequest,
    ScoreSequence,
    TensorChunk,
    TokenChunk,
    UpdatePolicy,
    WeightUpdate,
)
from rollout.weights import digest_of, root_digest, tensor_bytes
from rollout.worker import Worker
from tests.services import (
    PROMPT,
    Bits,
    StepGate,
    bits_of_chunks,
    engine_bits,
    mixed_requests,
    queued,
    sampling,
    soon,
    tensors_of,
    tiny_settings,
    version_path,
)


@asynccontextmanager
async def running_pool(path: Path, count: int = 1, **engine: Any) -> AsyncIterator[tuple[Pool, list[EngineThread]]]:
    """A started pool and its engines."""
    settings = tiny_settings(path, replicas=count, **engine)
    workers = [Worker(settings, str(path), f"w{i}") for i in range(count)]
    pool = Pool([LocalReplica(w, f"w{i}") for i, w in enumerate(workers)], settings, "tiny", None)
    await pool.start()
    try:
        yield pool, [w._thread for w in workers]
    finally:
        await pool.stop()


async def collect(pool: Pool, request: GenerateRequest) -> tuple[list[Bits], Completion]:
    """A whole answer; the end of every sample comes once, and the Completion repeats them."""
    events = [event async for event in pool.generate(request)]
    completion = events[-1]
    assert isinstance(completion, Completion)
    ends = [e for e in events if isinstance(e, SampleSummary)]
    assert sorted(ends, key=lambda e: e.sample_index) == list(completion.samples)
    assert [e.sample_index for e in completion.samples] == [request.sample_index + i for i in range(request.n)]
    return bits_of_chunks(e for e in events if isinstance(e, TokenChunk)), completion


async def answers(pool: Pool, requests: Sequence[GenerateRequest]) -> list[list[Bits]]:
    return [got for got, _ in await soon(asyncio.gather(*(collect(pool, r) for r in requests)))]


def update_of(path: Path, seed: int, version: int, **head: Any) -> tuple[WeightUpdate, list[TensorChunk]]:
    tensors = tensors_of(version_path(path, seed))
    digest = root_digest({name: digest_of(name, tensor) for name, tensor in tensors})
    update = dataclasses.replace(WeightUpdate(version, digest, len(tensors)), **head)
    return update, [TensorChunk(n, "float32", tuple(t.shape), 0, bytes(tensor_bytes(t))) for n, t in tensors]


async def stream(chunks: Sequence[TensorChunk], fail: Exception | None = None) -> AsyncIterator[TensorChunk]:
    for chunk in chunks:
        yield chunk
    if fail is not None:
        raise fail


async def score(pool: Pool, *ids: tuple[int, ...], temperature: float = 1.0) -> list[bytes]:
    result = await pool.score(ScoreRequest("s", tuple(map(ScoreSequence, ids)), temperature))
    return [s.logprobs.tobytes() for s in result.scores]


# ---- the same answer everywhere ---------------------------------------------------------------------------------


async def test_one_replica_two_replicas_and_the_bare_engine_agree(tiny_qwen3_path: Path) -> None:
    requests = mixed_requests(6)
    expected = engine_bits(tiny_settings(tiny_qwen3_path), requests)
    async with running_pool(tiny_qwen3_path, 1) as (one, _), running_pool(tiny_qwen3_path, 2) as (two, threads):
        assert await answers(one, requests) == expected
        # All at once, in another order: other companions, other replicas.
        assert (await answers(two, requests[::-1]))[::-1] == expected
        assert all(thread.engine.pages.num_free == thread.engine.pages.num_pages for thread in threads)
        other = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, seed=5)) for r in requests]
        assert await answers(one, other) != expected, "control: other seeds"


async def test_n_samples_are_n_requests_and_a_prefix_of_more(tiny_qwen3_path: Path) -> None:
    async with running_pool(tiny_qwen3_path, 2) as (pool, _):
        eight = GenerateRequest("r", PROMPT, sampling(seed=3, max_tokens=12), n=8, row_digests=True)
        (together,) = await answers(pool, [eight])
        singles = [dataclasses.replace(eight, request_id=f"r{i}", n=1, sample_index=i) for i in range(8)]
        assert [b for (b,) in await answers(pool, singles)] == together
        for n in (1, 3):
            (part,) = await answers(pool, [dataclasses.replace(eight, n=n)])
            assert part == together[:n]
        (tail,) = await answers(pool, [dataclasses.replace(eight, n=3, sample_index=5)])
        assert tail == together[5:]
        assert len({b.ids for b in together}) > 1, "control: siblings differ"


async def test_without_a_seed_one_is_drawn_and_returned(tiny_qwen3_path: Path) -> None:
    request = GenerateRequest("r", PROMPT, sampling(seed=None, max_tokens=24), n=2)
    async with running_pool(tiny_qwen3_path, 2) as (pool, _):
        (first, said), (second, other) = [await collect(pool, request) for _ in range(2)]
        assert said.sampling.seed is not None and said.sampling.seed != other.sampling.seed
        assert first != second
        again, _ = await collect(pool, dataclasses.replace(request, sampling=said.sampling))
        assert again == first


async def test_effective_parameters_are_echoed(tiny_qwen3_path: Path) -> None:
    async with running_pool(tiny_qwen3_path) as (pool, _):
        _, said = await collect(
            pool, GenerateRequest("r", PROMPT, sampling(temperature=0.7, max_tokens=None, top_k=-1))
        )
        assert (said.sampling.temperature, said.sampling.top_k) == (float(np.float32(0.7)), 0)
        assert said.sampling.max_tokens == 512 - len(PROMPT)
        assert (said.samples[0].finish.reason, said.samples[0].finish.limit) == (FinishReason.LENGTH, "context")
        assert said.prompt_ids == PROMPT
        assert said.manifest_digest == pool.manifest_digest
        scored = await pool.score(ScoreRequest("s", (ScoreSequence(PROMPT),), temperature=0.7))
        assert scored.temperature == said.sampling.temperature, "both say what divided the logits"
        assert scored.mode is LogprobMode.TEMPERED


# ---- requests ---------------------------------------------------------------------------------------------------


async def test_abort_by_name_and_of_all(tiny_qwen3_path: Path) -> None:
    async with running_pool(tiny_qwen3_path, 2) as (pool, threads):
        await pool.pause()
        names = ("a", "b", "c")
        tasks = [asyncio.ensure_future(collect(pool, GenerateRequest(n, PROMPT, sampling(), n=2))) for n in names]
        while pool.num_live < 6:
            await asyncio.sleep(0)
        assert await soon(pool.abort("b")) == 2
        _, said = await soon(tasks[1])
        assert {s.finish.reason for s in said.samples} == {FinishReason.ABORTED}
        assert {s.num_tokens for s in said.samples} == {0}
        assert not tasks[0].done() and not tasks[2].done(), "control: the others live on"
        with pytest.raises(NotFound, match="'b'"):
            await pool.abort("b")
        assert await soon(pool.abort("")) == 4
        await soon(asyncio.gather(*tasks))
        assert pool.num_live == 0
        assert all(not t.engine.live_ids and t.engine.pages.num_free == t.engine.pages.num_pages for t in threads)


async def test_closing_the_iterator_frees_everything(tiny_qwen3_path: Path) -> None:
    async with running_pool(tiny_qwen3_path) as (pool, (thread,)), StepGate(thread, 5) as gate:
        async with aclosing(pool.generate(GenerateRequest("r", PROMPT, sampling(max_tokens=400), n=3))) as events:
            await soon(anext(events))
            await gate.reached()
            assert len(thread.engine.live_ids) == 3, "control: they run"
            gate.open()
        assert thread.engine.live_ids == []
        assert thread.engine.pages.num_free == thread.engine.pages.num_pages
        assert pool.num_live == 0


async def test_every_sample_is_answered_once_also_when_clients_leave(tiny_qwen3_path: Path) -> None:
    """Sixty requests, every third client leaves at some point; the others get the bits they would get alone."""
    requests = [
        GenerateRequest(f"r{i}", PROMPT, sampling(seed=i, max_tokens=8), n=1 + i % 2, row_digests=True)
        for i in range(60)
    ]
    expected = engine_bits(tiny_settings(tiny_qwen3_path), requests)
    async with running_pool(tiny_qwen3_path, 2) as (pool, threads):

        async def client(i: int) -> list[Bits] | None:
            if i % 3:
                return (await collect(pool, requests[i]))[0]
            async with aclosing(pool.generate(requests[i])) as events:
                for _ in range(i % 4):
                    await anext(events)
            return None

        got = await soon(asyncio.gather(*(client(i) for i in range(60))))
        assert [g for g in got if g is not None] == [e for i, e in enumerate(expected) if i % 3]
        assert pool.num_live == 0
        for thread in threads:
            thread.engine.scheduler.check()
            assert thread.engine.pages.num_free == thread.engine.pages.num_pages


@pytest.mark.parametrize(("n", "index", "field"), [(0, 0, "n"), (17, 0, "n"), (1, -1, "sample_index")])
async def test_counts_out_of_range(tiny_qwen3_path: Path, n: int, index: int, field: str) -> None:
    async with running_pool(tiny_qwen3_path) as (pool, _):
        with pytest.raises(InvalidRequest) as caught:
            await collect(pool, GenerateRequest("r", PROMPT, sampling(), n=n, sample_index=index))
        assert caught.value.field == field
        assert len((await collect(pool, GenerateRequest("r", PROMPT, sampling(max_tokens=2), n=16)))[0]) == 16


async def test_no_sequences_and_no_tokenizer(tiny_qwen3_path: Path) -> None:
    async with running_pool(tiny_qwen3_path) as (pool, _):
        with pytest.raises(InvalidRequest, match="no sequences"):
            await pool.score(ScoreRequest("s", ()))
        with pytest.raises(UnsupportedFeature, match="tokenizer"):
            pool.encode("text")


# ---- scoring ----------------------------------------------------------------------------------------------------


async def test_scores_do_not_depend_on_company_or_order(tiny_qwen3_path: Path) -> None:
    ids = tuple(2 + i * 7 % 60 for i in range(70))
    cuts = [ids[:n] for n in (2, 13, 16, 17, 21, 25, 33, 70)]
    async with running_pool(tiny_qwen3_path, 2) as (pool, _):
        together = await score(pool, *cuts)
        assert (await score(pool, *cuts[::-1]))[::-1] == together
        assert [(await score(pool, cut))[0] for cut in cuts] == together
        assert all(long.startswith(short) for short, long in itertools.pairwise(together))
        assert await score(pool, *cuts, temperature=0.5) != together, "control: another temperature"


async def test_one_answer_speaks_of_one_version(tiny_qwen3_path: Path) -> None:
    """An update commits after the first sequence was scored and before the second: the first is scored again."""
    update, chunks = update_of(tiny_qwen3_path, 1, 1, policy=UpdatePolicy.WAIT)
    pair = (PROMPT * 3, PROMPT * 5)
    async with running_pool(tiny_qwen3_path, max_running=1) as (pool, (thread,)):
        before = await score(pool, *pair)
        async with StepGate(thread, 1) as gate:
            task = asyncio.ensure_future(pool.score(ScoreRequest("s", tuple(map(ScoreSequence, pair)))))
            await gate.reached()
            # The update's first command to the engine is the one that stops admission.
            update_task = await queued(thread, pool.update_weights(update, stream(chunks)))
            gate.open()
        result = await soon(task)
        await soon(update_task)
        after = await score(pool, *pair)
        assert result.weight_version == 1
        assert [s.logprobs.tobytes() for s in result.scores] == after
        assert after[0] != before[0] and after[1] != before[1], "control: the weights matter"


# ---- updates ----------------------------------------------------------------------------------------------------


class Interposed:
    """A replica whose named method first waits for ``gate``, or raises ``error`` instead."""

    def __init__(self, replica: Replica, method: str, error: Exception | None = None) -> None:
        self.name = replica.name
        self._replica, self._method, self._error = replica, method, error
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        if method == self._method:
            self.reached.set()
            if self._error is not None:
                raise self._error
            await self.gate.wait()
        return await self._replica.call(method, *args)

    async def share(self, value: Any) -> Any:
        return await self._replica.share(value)

    async def stop(self) -> None:
        await self._replica.stop()


@asynccontextmanager
async def interposed_pool(
    path: Path, method: str, error: Exception | None = None
) -> AsyncIterator[tuple[Pool, Interposed, list[EngineThread]]]:
    """Two replicas, the second interposed."""
    settings = tiny_settings(path, replicas=2)
    workers = [Worker(settings, str(path), f"w{i}") for i in range(2)]
    second = Interposed(LocalReplica(workers[1], "w1"), method, error)
    pool = Pool([LocalReplica(workers[0], "w0"), second], settings, "tiny", None)
    await pool.start()
    try:
        yield pool, second, [w._thread for w in workers]
    finally:
        await pool.stop()


async def assert_serves(pool: Pool, threads: Sequence[EngineThread], version: int, expected: list[bytes]) -> None:
    """Every replica holds this version, and none is held up."""
    assert [t.weights.version for t in threads] == [version] * len(threads)
    assert (await pool.info()).weights.version == version
    # As many at once as make each replica take one.
    assert await soon(asyncio.gather(*(score(pool, PROMPT * 3) for _ in range(4)))) == [expected] * 4


@pytest.mark.parametrize("phase", ["stage", "stage_chunks", "verify_stage", "quiesce"])
async def test_one_replica_that_refuses_leaves_all_on_the_old_version(tiny_qwen3_path: Path, phase: str) -> None:
    update, chunks = update_of(tiny_qwen3_path, 1, 1)
    async with interposed_pool(tiny_qwen3_path, phase, WeightUpdateError("not here")) as (pool, second, threads):
        before = await score(pool, PROMPT * 3)
        with pytest.raises(WeightUpdateError, match="not here"):
            await soon(pool.update_weights(update, stream(chunks)))
        await assert_serves(pool, threads, 0, before)
        second._method = "none"
        await soon(pool.update_weights(update, stream(chunks)))
        after = await score(pool, PROMPT * 3)
        await assert_serves(pool, threads, 1, after)
        assert after != before, "control: the update does change the bits"


async def test_a_replica_that_cannot_commit_is_fenced(tiny_qwen3_path: Path) -> None:
    update, chunks = update_of(tiny_qwen3_path, 1, 1)
    async with interposed_pool(tiny_qwen3_path, "commit", RuntimeError("disk")) as (pool, _, threads):
        state = await soon(pool.update_weights(update, stream(chunks)))
        assert (state.version, [t.weights.version for t in threads]) == (1, [1, 0])
        info = await pool.info()
        assert [(r.name, r.healthy) for r in info.replicas] == [("w0", True), ("w1", False)]
        assert {
            (await collect(pool, GenerateRequest("r", PROMPT, sampling())))[1].samples[0].replica for _ in "12"
        } == {"w0"}


async def test_a_sender_that_leaves_during_the_commit_does_not_split_the_replicas(tiny_qwen3_path: Path) -> None:
    update, chunks = update_of(tiny_qwen3_path, 1, 1)
    async with interposed_pool(tiny_qwen3_path, "commit") as (pool, second, threads):
        task = asyncio.ensure_future(pool.update_weights(update, stream(chunks)))
        await soon(second.reached.wait())
        task.cancel()
        await asyncio.sleep(0)
        second.gate.set()
        await soon(asyncio.gather(task, return_exceptions=True))
        await assert_serves(pool, threads, 1, await score(pool, PROMPT * 3))


async def test_a_sender_that_leaves_while_samples_finish_frees_every_replica(tiny_qwen3_path: Path) -> None:
    update, chunks = update_of(tiny_qwen3_path, 1, 1)
    async with running_pool(tiny_qwen3_path, 2) as (pool, threads):
        before = await score(pool, PROMPT * 3)
        async with StepGate(threads[0], 3) as first, StepGate(threads[1], 3) as second:
            tasks = [asyncio.ensure_future(collect(pool, GenerateRequest(n, PROMPT, sampling()))) for n in "ab"]
            await first.reached()
            await second.reached()
            sender = await queued(threads[1], pool.update_weights(update, stream(chunks)))
            sender.cancel()
            await asyncio.sleep(0)
            first.open()
            second.open()
            await soon(asyncio.gather(sender, return_exceptions=True))
        for _, said in await soon(asyncio.gather(*tasks)):
            assert said.samples[0].num_tokens == 40
        await assert_serves(pool, threads, 0, before)


async def test_a_stream_that_breaks_is_dropped_whole(tiny_qwen3_path: Path) -> None:
    update, chunks = update_of(tiny_qwen3_path, 1, 1)
    async with running_pool(tiny_qwen3_path, 2) as (pool, threads):
        before = await score(pool, PROMPT * 3)
        with pytest.raises(InvalidRequest, match="bad chunk"):
            await pool.update_weights(update, stream(chunks[:5], InvalidRequest("bad chunk")))
        await assert_serves(pool, threads, 0, before)
        await pool.update_weights(update, stream(chunks))
        await assert_serves(pool, threads, 1, await score(pool, PROMPT * 3))


# ---- start ------------------------------------------------------------------------------------------------------


async def test_replicas_that_differ_do_not_start(tiny_qwen3_path: Path) -> None:
    settings = tiny_settings(tiny_qwen3_path, replicas=2)
    paths = [tiny_qwen3_path, version_path(tiny_qwen3_path, 1)]
    workers = [Worker(settings, str(path), f"w{i}") for i, path in enumerate(paths)]
    pool = Pool([LocalReplica(w, f"w{i}") for i, w in enumerate(workers)], settings, "tiny", None)
    with pytest.raises(ReplicaUnavailable, match="starting"):
        await pool.info()
    with pytest.raises(ParityError, match="w0 and w1 differ"):
        await pool.start()
    await pool.stop()


async def test_a_replica_that_does_not_come_up_is_named(tiny_qwen3_path: Path) -> None:
    settings = tiny_settings(tiny_qwen3_path).model_copy(
        update={"worker": tiny_settings(tiny_qwen3_path).worker.model_copy(update={"start_timeout_s": 0.05})}
    )
    late = Interposed(LocalReplica(Worker(settings, str(tiny_qwen3_path), "w0"), "w0"), "info")
    pool = Pool([late], settings, "tiny", None)
    with pytest.raises(ReplicaUnavailable, match="start_timeout_s"):
        await pool.start()
    late.gate.set()
    await pool.start()
    assert (await pool.info()).weights.version == 0, "control: once it is up, the pool starts"
    await pool.stop()
