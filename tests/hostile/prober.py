"""A client in a process of its own that asks for one sample at a steady rate, and times each refusal.

``python -m tests.hostile.prober ADDRESS`` prints "ready", asks until a line comes in, and prints what it found as JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from rollout.v1 import rollout_pb2 as pb
from rollout.v1 import rollout_pb2_grpc
from tests.hostile.clock import CALL_S

ASK_EVERY_S = 0.05


def request(number: int, tokens: int) -> pb.GenerateRequest:
    """One sample of fixed length."""
    sampling = pb.SamplingParams(seed=number, max_tokens=tokens, ignore_eos=True)
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=[3, 4, 5]), sampling=sampling)


def retry_of(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds that RetryInfo names, None without it."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return None


class Findings:
    """What became of the calls."""

    def __init__(self) -> None:
        self.refused: list[float] = []
        """seconds from the call to its status, RESOURCE_EXHAUSTED with RetryInfo"""
        self.admitted = 0
        self.waited = 0
        """let in, and then in the queue until their deadline; a refusal as late would show in the service's times"""
        self.other: list[str] = []

    async def ask(self, stub: Any) -> None:
        """One call. It does not wait for the one before, so that a slow answer hides no other."""
        start = time.monotonic()
        call = stub.Generate(request(0, 1), timeout=CALL_S)
        try:
            await call.read()
            call.cancel()
            self.admitted += 1
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_of(error) is not None:
                self.refused.append(time.monotonic() - start)
            elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.waited += 1
            else:
                self.other.append(f"{error.code().name} {error.details()}"[:120])


async def probe(address: str) -> dict[str, Any]:
    """Ask until the input ends, then wait for the answers."""
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    found = Findings()
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        print("ready", flush=True)
        due, calls = time.monotonic(), set[asyncio.Task[None]]()
        while not ended.done():
            calls.add(asyncio.create_task(found.ask(stub)))
            due += ASK_EVERY_S
            await asyncio.wait([ended], timeout=max(0.0, due - time.monotonic()))
        await asyncio.gather(*calls)
    return vars(found)


class Prober:
    """The other end."""

    def __init__(self, address: str) -> None:
        words = [sys.executable, "-m", "tests.hostile.prober", address]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def end(self) -> dict[str, Any]:
        """What it found: times of refusals, how many were admitted, what else came."""
        answer, _ = self._process.communicate("\n", timeout=60)
        found: dict[str, Any] = json.loads(answer)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(probe(sys.argv[1]))))
