"""``make load``: LOAD_STREAMS (1,000) concurrent streams against a Ray worker, and how fast "full" is told.

Two patterns. *Full*: the queue holds all streams, each of which asks again when it has ended, and another process asks
20 times a second for LOAD_SECONDS (20). *At once*: all ask in the same instant, and a quarter of them fits; those
refused come back when RetryInfo says, until every one is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from rollout.v1 import rollout_pb2_grpc
from tests.hostile.child import Child, Reading, child_settings
from tests.hostile.clock import Times
from tests.hostile.prober import Prober, request, retry_of

TOKENS = 48
LONG = 400
"""Tokens of a stream of the pattern *full*."""
RUNNING = 32
CHANNELS = 4
LIMIT_S = 0.1
"""What 99 of 100 refusals of the pattern *full* must stay below."""
OPEN_S = 60.0
"""Within which all streams must be in the queue."""


@dataclass(frozen=True, slots=True)
class Full:
    """What the pattern *full* showed."""

    outcomes: Counter[str]
    """of the streams"""
    probed: dict[str, Any]
    """of the other process, see ``Prober.end``"""
    times: Times
    """of the service's own clock"""
    live: list[int]
    """samples in the service, looked at twice a second"""
    after: Reading


@dataclass(frozen=True, slots=True)
class AtOnce:
    """What the pattern *at once* showed."""

    outcomes: Counter[str]
    refusals: list[float]
    """seconds, as the streams saw them"""
    seconds: float
    times: Times
    after: Reading


async def answered(
    stub: Any, number: int, outcomes: Counter[str], refusals: list[float], tokens: int = TOKENS
) -> bytes:
    """Bits of one stream, however often it had to come back."""
    while True:
        start = time.monotonic()
        parts: list[bytes] = []
        try:
            async for message in stub.Generate(request(number, tokens), timeout=600):
                if message.WhichOneof("event") == "chunk":
                    parts += [message.chunk.token_ids.data, message.chunk.policy_logprobs.data]
        except grpc.aio.AioRpcError as error:
            delay = retry_of(error)
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or delay is None:
                outcomes[f"{error.code().name} {error.details()}"[:120]] += 1
                return b""
            refusals.append(time.monotonic() - start)
            outcomes["refused, came back"] += 1
            await asyncio.sleep(delay)
        else:
            outcomes["whole" if sum(map(len, parts)) == 8 * tokens else "cut short"] += 1
            return b"".join(sorted(parts))


@asynccontextmanager
async def _stubs(address: str) -> AsyncIterator[list[Any]]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CHANNELS)]
        yield [rollout_pb2_grpc.RolloutServiceStub(await stack.enter_async_context(c)) for c in channels]


async def crowd(address: str, streams: int) -> dict[str, Any]:
    """All streams at once; how they ended."""
    outcomes: Counter[str] = Counter()
    refusals: list[float] = []
    async with _stubs(address) as stubs:
        start = time.monotonic()
        await asyncio.gather(*(answered(stubs[i % CHANNELS], i, outcomes, refusals) for i in range(streams)))
    return {"outcomes": outcomes, "refusals": refusals, "seconds": time.monotonic() - start}


async def siege(child: Child, streams: int, seconds: float) -> tuple[Counter[str], dict[str, Any], Times, list[int]]:
    """Hold the queue full, and probe it."""
    outcomes: Counter[str] = Counter()
    live: list[int] = []

    async def again(stub: Any, number: int) -> None:
        while await answered(stub, number, outcomes, [], LONG):
            pass

    async with _stubs(child.address) as stubs:
        calls = [asyncio.create_task(again(stubs[i % CHANNELS], i)) for i in range(streams)]
        async with asyncio.timeout(OPEN_S):
            while await asyncio.to_thread(child.live) < streams:
                await asyncio.sleep(0.1)
        with await asyncio.to_thread(Prober, child.address) as prober:
            await asyncio.to_thread(child.times)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                live.append(await asyncio.to_thread(child.live))
                await asyncio.sleep(0.5)
            times = await asyncio.to_thread(child.times)
            ended = [call for call in calls if call.done()]
            probed = await asyncio.to_thread(prober.end)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    outcomes["gave up"] += len(ended)
    return outcomes, probed, times, live


def _settings(folder: Path, waiting: int) -> dict[str, Any]:
    limits = {"max_running": RUNNING, "max_waiting": waiting, "max_waiting_per_client": waiting}
    settings = child_settings(folder, **limits, kv_cache_tokens=16384)
    return settings | {"model": settings["model"] | {"context_length": 512}}


def run_full(folder: Path, streams: int, seconds: float, *, in_process: bool) -> Full:
    """The pattern *full* against a service of its own."""
    with Child(_settings(folder, streams - RUNNING), folder / "log", in_process=in_process) as child:
        # The first steps of an engine compile; nobody is to be timed by that.
        asyncio.run(crowd(child.address, RUNNING))
        outcomes, probed, times, live = asyncio.run(siege(child, streams, seconds))
        return Full(outcomes, probed, times, live, child.measure())


def run_at_once(folder: Path, streams: int, *, in_process: bool) -> AtOnce:
    """The pattern *at once*; a quarter of the streams fit into engine and queue."""
    with Child(_settings(folder, max(1, streams // 4 - RUNNING)), folder / "log", in_process=in_process) as child:
        asyncio.run(crowd(child.address, RUNNING))
        child.times()
        found = asyncio.run(crowd(child.address, streams))
        return AtOnce(**found, times=child.times(), after=child.measure())


def percentile(values: Iterable[float], part: float) -> float:
    """The value that ``part`` of them do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def _show(name: str, times: list[float]) -> None:
    shown = ", ".join(f"p{round(100 * p)} {1000 * percentile(times, p):.1f}" for p in (0.5, 0.9, 0.99, 1.0))
    print(f"  {name}: {len(times)} times, ms: {shown}".replace("p100", "max"))


def _show_times(times: Times) -> None:
    if times.refusals:
        _show("  in the server, from arrival to status", times.refusals)
    _show("  in the server, from its first line to status", times.handled)
    _show("  its event loop came too late by", times.late)
    if times.collections:
        _show("  garbage collections of the oldest generation", times.collections)


def _clean(after: Reading) -> bool:
    print(f"  afterwards: live samples {after.live}, held pages {after.held_pages}, buffered bytes {after.buffered}")
    return (after.live, after.held_pages, after.buffered) == (0, 0, 0)


def report_full(streams: int, found: Full) -> bool:
    """Print the counts; whether all is well."""
    probed = found.probed
    print(f"load, queue full: {streams} streams held for {len(found.live) / 2:.0f} s: {dict(found.outcomes)}")
    print(f"  samples in the service, looked at twice a second: {min(found.live)} to {max(found.live)}")
    told, done, waited, other = (probed[key] for key in ("refused", "admitted", "waited", "other"))
    print(f"  another process: {len(told)} refused, {done} answered, {waited} left in the queue, {other[:3]} other")
    _show("told to the other process", told)
    _show_times(found.times)
    fine = set(found.outcomes) <= {"whole", "refused, came back", "gave up"} and not found.outcomes["gave up"]
    quick = all(percentile(times, 0.99) < LIMIT_S for times in (told, found.times.refusals))
    print(f"  p99 below {1000 * LIMIT_S:.0f} ms, by both clocks: {quick}")
    return _clean(found.after) and fine and quick and not other


def report_at_once(streams: int, found: AtOnce) -> bool:
    """Print the counts; whether all is well but the times, which are those of so many calls on these cores."""
    print(f"load, all at once: {streams} streams, {found.seconds:.1f} s: {dict(found.outcomes)}")
    _show("told to the streams", found.refusals)
    _show_times(found.times)
    fine = set(found.outcomes) <= {"whole", "refused, came back"} and found.outcomes["whole"] == streams
    return _clean(found.after) and fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=int(os.environ.get("LOAD_STREAMS", "1000")))
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("LOAD_SECONDS", "20")))
    parser.add_argument("--in-process", action="store_true", help="engine and server share one process")
    parser.add_argument("--only", choices=["full", "at-once"])
    options = parser.parse_args()
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "at-once":
            full = run_full(Path(folder), options.streams, options.seconds, in_process=options.in_process)
            fine &= report_full(options.streams, full)
        if options.only != "full":
            at_once = run_at_once(Path(folder), options.streams, in_process=options.in_process)
            fine &= report_at_once(options.streams, at_once)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
