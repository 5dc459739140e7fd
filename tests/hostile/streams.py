"""``make load``: LOAD_STREAMS (1,000) concurrent streams against a Ray worker behind queues that cannot hold them all.

Refused streams come back as RetryInfo says, until every one is answered. Meanwhile another process asks again and again
for one sample and times how fast it is told that the queue is full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from rollout.v1 import rollout_pb2 as pb
from rollout.v1 import rollout_pb2_grpc
from tests.hostile.child import Child, Reading, child_settings

PROBE_EVERY_S = 0.05
TOKENS = 48
CHANNELS = 4
LIMIT_S = 0.1
"""What 99 of 100 refusals must stay below."""


def request(number: int) -> pb.GenerateRequest:
    """One sample of fixed length."""
    sampling = pb.SamplingParams(seed=number, max_tokens=TOKENS, ignore_eos=True)
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=[3, 4, 5]), sampling=sampling)


def retry_of(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds that RetryInfo names, None without it."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return float(info.retry_delay.seconds)
    return None


async def answered(stub: Any, number: int, outcomes: Counter[str], refusals: list[float]) -> bytes:
    """Bits of one stream, however often it had to come back."""
    while True:
        start = time.monotonic()
        parts: list[bytes] = []
        try:
            async for message in stub.Generate(request(number), timeout=600):
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
            outcomes["whole" if sum(map(len, parts)) == 8 * TOKENS else "cut short"] += 1
            return b"".join(sorted(parts))


async def crowd(address: str, streams: int) -> dict[str, Any]:
    """All streams at once; how they ended."""
    outcomes: Counter[str] = Counter()
    refusals: list[float] = []
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CHANNELS)]
        stubs = [rollout_pb2_grpc.RolloutServiceStub(await stack.enter_async_context(c)) for c in channels]
        start = time.monotonic()
        await asyncio.gather(*(answered(stubs[i % CHANNELS], i, outcomes, refusals) for i in range(streams)))
    return {"outcomes": outcomes, "refusals": refusals, "seconds": time.monotonic() - start}


async def probe(address: str) -> list[float]:
    """Seconds of every refusal that another client gets, until its input ends."""
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    times: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        print("ready", flush=True)
        while not ended.done():
            start = time.monotonic()
            call = stub.Generate(request(0), timeout=60)
            try:
                await call.read()
                call.cancel()
            except grpc.aio.AioRpcError as error:
                assert retry_of(error) is not None, error
                times.append(time.monotonic() - start)
            await asyncio.wait([ended], timeout=PROBE_EVERY_S)
    return times


def percentile(values: Iterable[float], part: float) -> float:
    """The value that ``part`` of them do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def run(folder: Path, streams: int, *, in_process: bool) -> tuple[dict[str, Any], list[float], Reading]:
    """Crowd and prober beside the service; a quarter of the streams fit into engine and queue."""
    limits = {"max_running": 32, "max_waiting": max(1, streams // 4 - 32), "max_waiting_per_client": streams}
    settings = child_settings(folder, **limits)
    words = [sys.executable, "-m", "tests.hostile.streams", "--probe"]
    with Child(settings, folder / "log", in_process=in_process) as child:
        # The first steps of an engine compile; nobody is to be timed by that.
        asyncio.run(crowd(child.address, 32))
        prober = subprocess.Popen([*words, child.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert prober.stdout is not None and prober.stdout.readline() == "ready\n"
        found = asyncio.run(crowd(child.address, streams))
        probed, _ = prober.communicate("\n", timeout=60)
        return found, json.loads(probed), child.measure()


def report(streams: int, found: dict[str, Any], probed: list[float], after: Reading) -> bool:
    """Print the counts; whether all is well but the times, which are the machine's."""
    outcomes: Counter[str] = found["outcomes"]
    own = found["refusals"]
    print(f"load: {streams} concurrent streams, {found['seconds']:.1f} s: {dict(outcomes)}")
    for name, times in (("another client", probed), ("the streams themselves, all at once", own)):
        shown = ", ".join(f"p{round(100 * p)} {1000 * percentile(times, p):.1f} ms" for p in (0.5, 0.9, 0.99))
        print(f"  queue full, told to {name}: {len(times)} times, {shown}")
    print(f"  afterwards: live samples {after.live}, held pages {after.held_pages}, buffered bytes {after.buffered}")
    return set(outcomes) <= {"whole", "refused, came back"} and outcomes["whole"] == streams and after.held_pages == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=int(os.environ.get("LOAD_STREAMS", "1000")))
    parser.add_argument("--in-process", action="store_true", help="engine and server share one process")
    parser.add_argument("--probe", metavar="ADDRESS")
    options = parser.parse_args()
    if options.probe:
        print(json.dumps(asyncio.run(probe(options.probe))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found, probed, after = run(Path(folder), options.streams, in_process=options.in_process)
    fine = report(options.streams, found, probed, after)
    return 0 if fine and percentile(probed, 0.99) < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
