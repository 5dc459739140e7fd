"""Starting replicas again: with the present weights, before they take samples; and what an operator asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import OwnerDiedError

from rollout.errors import CertificateError, NotFound, ReplicaUnavailable, UnsupportedFeature, WeightUpdateError
from rollout.kept_weights import SentBucket, copy_weights
from rollout.pool import Pool
from rollout.replica import LocalReplica, Replica
from rollout.supervisor import RestartLimits, Supervisor
from rollout.types import GenerateRequest, TensorChunk, TokenChunk, UpdatePolicy, WeightState, WeightUpdate
from rollout.weight_export import ExportPlace, export_bucket
from rollout.weights import digest_of, dtype_name, root_digest, tensor_bytes, tensor_digest
from rollout.worker import Worker
from tests.services import (
    PROMPT,
    StepGate,
    bits_of_chunks,
    engine_bits,
    make_engine,
    sampling,
    soon,
    tensors_of,
    tiny_settings,
    version_path,
)


class Makers:
    """Starts workers of this process in place of Ray actors; may refuse."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made: list[LocalReplica] = []
        self.refusals: list[Exception] = []

    async def __call__(self, name: str) -> Replica:
        if self.refusals:
            raise self.refusals.pop(0)
        worker = await asyncio.to_thread(Worker, tiny_settings(self.path), str(self.path), name)
        self.made.append(LocalReplica(worker, name))
        return self.made[-1]


@asynccontextmanager
async def supervised(
    path: Path, count: int = 2, attempts: int = 3, keep_weights: bool = False
) -> AsyncIterator[tuple[Pool, Supervisor, Makers]]:
    settings = tiny_settings(path, replicas=count)
    replicas: list[Replica] = [LocalReplica(Worker(settings, str(path), f"w{i}"), f"w{i}") for i in range(count)]
    pool = Pool(replicas, settings, "tiny", None, keep_weights=keep_weights)
    await pool.start()
    makers = Makers(path)
    supervisor = Supervisor(pool, makers, RestartLimits(60.0, attempts, 4096))
    supervisor.start()
    try:
        yield pool, supervisor, makers
    finally:
        await supervisor.stop()
        await pool.stop()


async def back(pool: Pool, name: str) -> None:
    """Until a new life of the replica takes samples."""
    while not ((slot := pool.router.slot(name)) is not None and slot.serving):
        await asyncio.sleep(0.01)


async def update(pool: Pool, path: Path, version: int, policy: UpdatePolicy = UpdatePolicy.WAIT) -> WeightState:

    tensors = tensors_of(path)
    digest = root_digest({name: digest_of(name, t) for name, t in tensors})

    async def chunks() -> AsyncIterator[TensorChunk]:
        for name, t in tensors:
            yield TensorChunk(name, dtype_name(t.dtype), tuple(t.shape), 0, bytes(tensor_bytes(t)))

    return await pool.update_weights(WeightUpdate(version, digest, len(tensors), policy), chunks())


async def answer(pool: Pool, **fields: Any) -> Any:

    request = GenerateRequest("r", PROMPT, sampling(**fields), row_digests=True)
    return bits_of_chunks([e async for e in pool.generate(request) if isinstance(e, TokenChunk)])


async def test_a_replica_comes_back_with_the_present_weights(tiny_qwen3_path: Path) -> None:
    """K9: killed after an update, it loads the checkpoint's weights and must not serve them."""
    other = version_path(tiny_qwen3_path, 1)

    request = GenerateRequest("r", PROMPT, sampling(), row_digests=True)
    (before,), (after,) = (engine_bits(tiny_settings(path), [request]) for path in (tiny_qwen3_path, other))
    async with supervised(tiny_qwen3_path) as (pool, supervisor, makers):
        state = await update(pool, other, 1)
        old = pool.router.slot("w0")
        pool.router.fence("w0", ReplicaUnavailable("killed"))
        await soon(back(pool, "w0"))
        assert pool.router.slot("w0") is not old and makers.made[0].name == "w0"
        info = await pool.info()
        assert [r.weights for r in info.replicas] == [state] * 2 and all(r.healthy for r in info.replicas)
        # Alone, so that it answers.
        pool.router.fence("w1", ReplicaUnavailable("killed"))
        assert await answer(pool) == after != before
        await soon(back(pool, "w1"))
        assert [s.restarts for s in supervisor.standings()] == [1, 1]


async def test_samples_wait_for_the_only_replica_to_come_back(tiny_qwen3_path: Path) -> None:
    async with supervised(tiny_qwen3_path, count=1) as (pool, _, makers):
        calm = await answer(pool, max_tokens=60)
        thread = pool.router.replicas[0]._worker._thread  # type: ignore[attr-defined]
        async with StepGate(thread, 9) as gate:
            asked = asyncio.ensure_future(answer(pool, max_tokens=60))
            await gate.reached()
            pool.router.fence("w0", ReplicaUnavailable("killed"))
            with pytest.raises(ReplicaUnavailable, match="being started"):
                await answer(pool)
        assert await soon(asked) == calm
        assert len(makers.made) == 1


async def test_a_pause_holds_for_one_that_comes_back(tiny_qwen3_path: Path) -> None:
    async with supervised(tiny_qwen3_path) as (pool, _, makers):
        await pool.pause()
        pool.router.fence("w0", ReplicaUnavailable("killed"))
        await soon(back(pool, "w0"))
        (made,) = makers.made
        assert made._worker._thread._paused
        await pool.resume()
        assert not made._worker._thread._paused


async def test_with_no_donor_left_it_gets_what_was_sent(tiny_qwen3_path: Path) -> None:
    """The last update is kept: what came before it, or was withdrawn after it, is not."""
    async with supervised(tiny_qwen3_path, count=1, keep_weights=True) as (pool, supervisor, _):
        assert pool.kept_weights is None
        await update(pool, version_path(tiny_qwen3_path, 2), 1)
        state = await update(pool, version_path(tiny_qwen3_path, 1), 2)
        after = await answer(pool)
        with pytest.raises(WeightUpdateError, match="does not exceed"):
            await update(pool, tiny_qwen3_path, 2)
        for life in (1, 2):
            pool.router.fence("w0", ReplicaUnavailable("killed"))
            await soon(back(pool, "w0"))
            assert await answer(pool) == after
            (replica,) = (await pool.info()).replicas
            assert (replica.weights, supervisor.standings()[0].restarts) == (state, life)


@pytest.mark.parametrize("fault", ["another digest", "a bucket less", "the sender's process has ended"])
async def test_what_was_kept_is_proven_again(
    tiny_qwen3_path: Path, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the test before: a kept set that is not what was served lets nobody serve."""
    async with supervised(tiny_qwen3_path, count=1, attempts=1, keep_weights=True) as (pool, supervisor, _):
        await update(pool, version_path(tiny_qwen3_path, 1), 1)
        kept = pool.kept_weights
        assert kept is not None
        if fault == "another digest":
            broken = replace(kept, update=replace(kept.update, digest="ab" * 32))
        elif fault == "a bucket less":
            broken = replace(kept, buckets=kept.buckets[:-1])
        else:
            broken = replace(kept, buckets=(SentBucket("raise_ray_error", None),))
            original = LocalReplica.call

            async def call(self: LocalReplica, method: str, *args: Any) -> Any:
                if method == "raise_ray_error":
                    raise OwnerDiedError("00" * 28, None, "")
                return await original(self, method, *args)

            monkeypatch.setattr(LocalReplica, "call", call)
        pool._kept = broken
        pool.router.fence("w0", ReplicaUnavailable("killed"))
        while supervisor._revivals:
            await asyncio.sleep(0.01)
        (standing,) = supervisor.standings()
        assert not standing.serving
        words = {"another digest": "root digest", "a bucket less": "missing"}.get(fault, "send the weights again")
        assert words in standing.reason
        assert "is back" not in caplog.text


async def test_with_no_donor_left_it_waits_for_weights(tiny_qwen3_path: Path) -> None:
    """Version 1 went with its last holder: version 0 must not be served in its place, and an update ends the wait."""
    other = version_path(tiny_qwen3_path, 1)
    async with supervised(tiny_qwen3_path, count=1) as (pool, supervisor, _):
        await update(pool, other, 1)
        after = await answer(pool)
        pool.router.fence("w0", ReplicaUnavailable("killed"))
        old = pool.router.slot("w0")
        while pool.router.slot("w0") is old:
            await asyncio.sleep(0.01)
        (standing,) = supervisor.standings()
        assert not standing.serving and "send the weights again" in standing.reason
        with pytest.raises(ReplicaUnavailable, match="no replica is in rotation"):
            await answer(pool)
        assert not (await pool.info()).replicas[0].healthy
        await update(pool, other, 2)
        assert await answer(pool) == after


async def test_failed_starts(tiny_qwen3_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.supervisor._FIRST_WAIT_S", 0.01)
    async with supervised(tiny_qwen3_path) as (pool, supervisor, makers):
        makers.refusals = [ReplicaUnavailable("no room")] * 2
        pool.router.fence("w0", ReplicaUnavailable("killed"))
        await soon(back(pool, "w0"))
        makers.refusals = [ReplicaUnavailable("no room")] * 3
        pool.router.fence("w0", ReplicaUnavailable("killed"))
        while supervisor._revivals:
            await asyncio.sleep(0.01)
        assert supervisor.standings()[0].reason == "killed; no room" and len(makers.made) == 1
        makers.refusals = [CertificateError("no certificate")]
        with pytest.raises(ReplicaUnavailable, match="no certificate"):
            await soon(supervisor.restart("w0", 1.0))
        assert makers.refusals == [], "control: strict serving is refused once, not tried again"
        assert (await soon(supervisor.restart("w0", 1.0))).serving


async def test_another_model_on_disk_is_refused(tiny_qwen3_path: Path) -> None:
    async with supervised(tiny_qwen3_path) as (pool, supervisor, makers):
        makers.path = version_path(tiny_qwen3_path, 1)
        pool.router.fence("w0", ReplicaUnavailable("killed"))
        while not supervisor._revivals:
            await asyncio.sleep(0)
        while supervisor._revivals:
            await asyncio.sleep(0.01)
        assert "differ" in supervisor.standings()[0].reason or "does not exceed" in supervisor.standings()[0].reason


async def test_drain_and_rolling_restart(tiny_qwen3_path: Path) -> None:
    async with supervised(tiny_qwen3_path) as (pool, supervisor, makers):
        calm = await answer(pool, max_tokens=80)
        thread = pool.router.replicas[0]._worker._thread  # type: ignore[attr-defined]
        async with StepGate(thread, 5) as gate:
            asked = asyncio.ensure_future(answer(pool, max_tokens=80))
            await gate.reached()
            standing = await supervisor.drain("w0", 0.0)
            assert (standing.serving, standing.held, standing.reason) == (False, 1, "it is drained")
            assert await answer(pool, max_tokens=80) == calm, "control: the other one serves"
        assert (await soon(supervisor.drain("w0", 20.0))).held == 0
        assert await soon(asked) == calm
        with pytest.raises(ReplicaUnavailable, match="last replica"):
            await supervisor.restart("w1", 0.0)
        assert supervisor.undrain("w0").serving
        names = [s.name async for s in supervisor.rolling_restart(5.0)]
        assert names == ["w0", "w1"] == [replica.name for replica in makers.made]
        assert await answer(pool, max_tokens=80) == calm
        with pytest.raises(NotFound, match="w0, w1"):
            await supervisor.drain("w7", 0.0)


async def test_without_restarts_a_replica_stays_out(tiny_qwen3_path: Path) -> None:
    async with supervised(tiny_qwen3_path, attempts=0) as (pool, supervisor, makers):
        pool.router.fence("w0", ReplicaUnavailable("killed"))
        with pytest.raises(UnsupportedFeature, match="max_restarts"):
            await supervisor.restart("w0", 0.0)
        assert makers.made == [] and supervisor.standings()[0].reason == "killed"


@pytest.mark.parametrize("most", [997, 4096, 1 << 30])
async def test_weights_travel_in_buckets(tiny_qwen3_path: Path, most: int) -> None:

    model = make_engine(tiny_settings(tiny_qwen3_path)).model
    place: ExportPlace | None = ExportPlace()
    found: dict[str, bytearray] = {}
    while place is not None:
        chunks, place = export_bucket(model, place, most)
        assert 0 < sum(len(c.data) for c in chunks) <= most
        for c in chunks:
            assert len(found.setdefault(c.name, bytearray())) == c.offset
            found[c.name] += c.data

    for name, p in model.parameters():
        assert tensor_digest(name, dtype_name(p.dtype), tuple(p.shape), found.pop(name)) == digest_of(name, p)
    assert not found


async def test_a_copy_that_differs_is_refused(tiny_qwen3_path: Path) -> None:
    other = version_path(tiny_qwen3_path, 1)
    async with supervised(tiny_qwen3_path) as (pool, _, _makers):
        state = await update(pool, other, 1)
        donor = pool.router.slot("w1")
        assert donor is not None
        worker = await asyncio.to_thread(Worker, tiny_settings(tiny_qwen3_path), str(tiny_qwen3_path), "w9")
        newcomer = LocalReplica(worker, "w9")
        with pytest.raises(Exception, match="digest"):
            await copy_weights(donor, newcomer, WeightState(1, "00" * 32), 1 << 20)
        await newcomer.call("release")
        await copy_weights(donor, newcomer, state, 4096)
        assert (await newcomer.call("info")).weights == state
        await newcomer.stop()
