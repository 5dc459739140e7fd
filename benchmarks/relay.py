"""What one server process can relay: CPU seconds a token, from an engine that costs nothing to a client elsewhere.

``python -m benchmarks.relay``; the figure feeds ``relay_chunks_s`` of ``benchmarks.scale_sim``. CPU time of the
server's process is counted, not the clock, so other load on the machine does not enter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

from rollout.metered import MeteredBackend
from rollout.metrics import PrometheusMeter
from rollout.server import start_server
from rollout.types import (
    Completion,
    FinishDetail,
    FinishReason,
    GenerateRequest,
    SampleSummary,
    SamplingParams,
    TokenChunk,
    VersionSpan,
)


class Flood:
    """A backend whose tokens cost nothing."""

    def __init__(self, tokens: int, chunk: int) -> None:
        self._tokens, self._chunk = tokens, chunk

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Any, None]:
        """``tokens`` tokens of each sample, ``chunk`` at a time."""
        ids, logprobs = np.arange(self._chunk, dtype=np.int32), np.full(self._chunk, -1.0, np.float32)
        for offset in range(0, self._tokens, self._chunk):
            for sample in range(request.n):
                yield TokenChunk(sample, offset, ids, logprobs, logprobs, 0)
            await asyncio.sleep(0)
        finish = FinishDetail(FinishReason.LENGTH, limit="max_tokens")
        spans = (VersionSpan(0, 0, self._tokens),)
        ends = [SampleSummary(sample, self._tokens, finish, spans) for sample in range(request.n)]
        for end in ends:
            yield end
        yield Completion(request.request_id, request.prompt_ids, request.sampling, tuple(ends), "0")


def client(address: str, requests: int, n: int, tokens: int) -> None:
    """Ask for everything at once and read it whole."""
    from trainer_bridge.aio_client import AsyncRolloutClient

    async def ask() -> None:
        async with AsyncRolloutClient(address) as http:
            sampling = SamplingParams(max_tokens=tokens, seed=1)
            results = await asyncio.gather(*(http.generate([1, 2, 3], sampling, n=n) for _ in range(requests)))
            assert sum(len(s.token_ids) for r in results for s in r.samples) == requests * n * tokens

    asyncio.run(ask())


async def measure(requests: int, n: int, tokens: int, chunk: int) -> dict[str, float]:
    """CPU seconds of this process while a client in another one reads."""
    backend: Any = MeteredBackend(Flood(tokens, chunk), PrometheusMeter(), queue_limit=1)  # type: ignore[arg-type]
    server = await start_server(backend, host="127.0.0.1", port=0, reflection=False)
    await server.set_serving(True)
    words = [sys.executable, "-m", "benchmarks.relay", "--client", f"127.0.0.1:{server.port}"]
    words += ["--requests", str(requests), "--n", str(n), "--tokens", str(tokens)]
    before = time.process_time()
    process = await asyncio.create_subprocess_exec(*words)
    if await process.wait():
        raise subprocess.CalledProcessError(process.returncode or 1, words)
    cpu_s = time.process_time() - before
    await server.stop(0)
    total = requests * n * tokens
    return {
        "tokens": total,
        "chunk": chunk,
        "cpu_s": cpu_s,
        "tokens_per_cpu_s": total / cpu_s,
        "chunks_per_cpu_s": total / chunk / cpu_s,
    }


def main() -> None:
    """Measure for several chunk sizes and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    if args.client:
        client(args.client, args.requests, args.n, args.tokens)
        return
    for chunk in (1, 4, 16):
        print(json.dumps(asyncio.run(measure(args.requests, args.n, args.tokens, chunk))))


if __name__ == "__main__":
    main()
