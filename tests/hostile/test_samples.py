"""Small samples of `make fuzz`, `make load` and `make soak-service`, and that their verdicts can fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollout.config import Settings
from rollout.errors import CapacityExceeded
from rollout.serving import running_service
from rollout.types import UpdatePolicy
from tests.hostile import fuzz, soak, streams
from tests.hostile.calls import HostileCall, Outcome
from tests.hostile.child import Reading, child_settings
from tests.hostile.clock import CALL_S, Clock, Times
from tests.hostile.prober import retry_of
from tests.services import check_pages, soon, tensors_of, version_path
from trainer_bridge.aio_client import AsyncRolloutClient

IDLE = Reading(rss=100 * 2**20, live=0, held_pages=0, buffered=0, tasks=15)


def tiny(path: Path, **engine: int) -> Settings:
    settings = child_settings(path.parent, **engine)
    return Settings.model_validate(settings | {"model": settings["model"] | {"path": str(path)}})


def test_fuzz_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tally, early, late, same = fuzz.fuzz(tmp_path, 300, seed=7)
    # So short a run says nothing about growth; everything else must hold.
    assert fuzz.report(tally, early, Reading(early.rss, late.live, late.held_pages, late.buffered, late.tasks), same)
    assert tally.calls == 300 and {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED"} <= tally.codes.keys()
    assert "faults: 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "details", "fault"),
    [
        ("OK", "", ""),
        ("INVALID_ARGUMENT", "n = 0 is outside [1, 16] (server.max_n)", ""),
        ("INTERNAL", "internal error, id=ab12", ""),
        ("INTERNAL", "internal error, id=other", "not in the log"),
        ("INTERNAL", "something broke", "without an id"),
        ("UNKNOWN", "Unexpected", "blames"),
        ("UNAVAILABLE", "Socket closed", "blames"),
        ("INVALID_ARGUMENT", 'File "x", line 3', "internals"),
        ("NOT_FOUND", "/home/someone/model", "internals"),
    ],
)
def test_what_counts_as_a_fault(tmp_path: Path, code: str, details: str, fault: str) -> None:
    log = tmp_path / "log"
    log.write_text("ERROR internal error in /x, id=ab12\n")
    call = HostileCall("/x", (), (), "read")
    found = fuzz.fault_of(call, Outcome(grpc.StatusCode[code], details, False), log)
    assert bool(found) == bool(fault) and fault in found


def test_a_bad_run_is_not_reported_as_good() -> None:
    tally = fuzz.Tally(codes=Counter(OK=10))
    assert fuzz.report(tally, IDLE, IDLE, True)
    assert not fuzz.report(tally, IDLE, IDLE, False)
    assert not fuzz.report(tally, IDLE, Reading(106 * 2**20, 0, 0, 0, 15), True)
    assert not fuzz.report(tally, IDLE, Reading(100 * 2**20, 0, 1, 0, 15), True)
    assert not fuzz.report(fuzz.Tally(codes=Counter(OK=10), faults=["x"]), IDLE, IDLE, True)


def test_a_soak_that_grows_or_keeps_something_is_not_reported_as_good() -> None:
    def readings(*mib: float) -> list[Reading]:
        return [Reading(int(size * 2**20), 0, 0, 0, 15) for size in mib]

    counts = Counter(generate=5)
    warm = [500, 520, 530, 535, 538, 540]
    assert soak.report(readings(*warm, *[540] * 54), counts)
    assert soak.report(readings(*warm, *[540] * 52, 544, 540), counts), "one reading decides nothing"
    assert not soak.report(readings(*warm, *[540 + 0.11 * i for i in range(54)]), counts), "slow, but without end"
    assert not soak.report(readings(*warm, *[540] * 20, *[546] * 34), counts)
    held = readings(*warm, *[540] * 54)
    held[20] = Reading(540 * 2**20, 0, 1, 0, 15)
    assert not soak.report(held, counts)
    assert not soak.report(readings(500, 500, 506), counts)


def at_once(**outcomes: int) -> streams.AtOnce:
    return streams.AtOnce(Counter({k.replace("_", " "): v for k, v in outcomes.items()}), [0.1], 1.0, Times(), IDLE)


def full(after: Reading = IDLE, **probed: Any) -> streams.Full:
    found: dict[str, Any] = {"refused": [0.01] * 100, "admitted": 1, "waited": 0, "other": []} | probed
    times = Times(refusals=found.pop("served", [0.01]))
    return streams.Full(Counter({"whole": 3, "refused, came back": 2}), found, times, [5, 5], after)


def test_a_bad_load_is_not_reported_as_good() -> None:
    assert streams.report_at_once(5, at_once(whole=5))
    for bad in (at_once(whole=4), at_once(whole=5, cut_short=1), at_once(whole=4, UNAVAILABLE_gone=1)):
        assert not streams.report_at_once(5, bad)
    assert streams.report_full(5, full())
    assert streams.report_full(5, full(refused=[0.01] * 99 + [0.099]))
    assert not streams.report_full(5, full(refused=[0.01] * 98 + [0.2] * 2)), "too slow"
    assert not streams.report_full(5, full(refused=[])), "nothing was measured"
    assert not streams.report_full(5, full(served=[9.0], waited=1)), "a refusal that came after the deadline"
    assert not streams.report_full(5, full(other=["UNAVAILABLE gone"]))
    assert not streams.report_full(5, full(Reading(IDLE.rss, 0, 1, 0, 15)))
    gone = full()
    gone.outcomes["gave up"] += 1
    assert not streams.report_full(5, gone)


async def test_full_queue_sample(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    """A child of its own: every stream is held, the prober is refused with RetryInfo, the service's clock saw it."""
    found = await asyncio.to_thread(lambda: streams.run_full(tmp_path, 48, 1.5, in_process=True))
    assert found.after.live == found.after.held_pages == 0 and not found.probed["other"]
    assert found.outcomes["gave up"] == 0 and set(found.outcomes) <= {"whole", "refused, came back", "gave up"}
    assert found.times.refusals and all(0 <= age < CALL_S for age in found.times.refusals)
    assert len(found.times.handled) >= len(found.times.refusals)


def test_the_clock_keeps_nothing_before_it_is_asked() -> None:
    """A float for every look would be 7 MiB in half an hour, and would pass for a leak of the service."""
    clock = Clock()

    def collect() -> None:
        for phase in ("start", "stop"):
            clock._collected(phase, {"generation": 2})

    collect()
    assert clock.times is None and clock.take() == Times()
    collect()
    assert len(clock.take().collections) == 1, "control"


async def test_load_sample(tiny_qwen3_path: Path) -> None:
    """Eight times as many streams as fit: every refusal says when to come back, and each stream is answered once."""
    settings = tiny(tiny_qwen3_path, max_running=4, max_waiting=6, max_waiting_per_client=6)
    async with running_service(settings, in_process=True) as service:
        found = await soon(streams.crowd(service.address, 80))
        async with AsyncRolloutClient(service.address) as client:
            await client.info()
        check_pages(service)
        assert service.pool.num_live == service.pool._buffers.waiting_bytes == 0
    assert found["outcomes"]["whole"] == 80 and found["outcomes"]["refused, came back"] > 0
    assert set(found["outcomes"]) == {"whole", "refused, came back"}


async def test_a_refusal_without_retry_info_would_be_seen() -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "full")
    assert retry_of(error) is None and CapacityExceeded.code == "RESOURCE_EXHAUSTED"


async def test_soak_sample(tiny_qwen3_path: Path) -> None:
    counts: Counter[str] = Counter()
    weights = [tensors_of(tiny_qwen3_path), tensors_of(version_path(tiny_qwen3_path, 5))]
    async with running_service(tiny(tiny_qwen3_path, max_waiting=16), in_process=True) as service:
        await soon(soak.traffic(service.address, 2.0, 3, weights, 1, counts))
        async with AsyncRolloutClient(service.address) as client:
            for replica in (await client.info()).replicas:
                assert replica.weights.version == len(UpdatePolicy)
        assert service.pool._buffers.waiting_bytes == 0
    assert {"generate", "score", "leave", "bad ended by InvalidRequest"} <= counts.keys()
    assert sum(count for kind, count in counts.items() if kind.startswith("update")) == len(UpdatePolicy)
