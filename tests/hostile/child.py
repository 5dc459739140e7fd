"""A service in a process of its own, which says on request how much memory it holds once it is idle.

``python -m tests.hostile.child SETTINGS`` (JSON) prints ``ready PORT``; each line "measure", "live" or "times" on its
input is answered with a line of JSON, "quit" ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import rollout.server
from rollout.assets import tiny_model
from rollout.config import Settings
from rollout.garbage import settle_heap
from rollout.serving import Service, running_service
from tests.hostile.clock import Clock, Times

ROOT = Path(__file__).parents[2]
IDLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Reading:
    """An idle service."""

    rss: int
    """resident bytes, after a collection and malloc_trim"""
    live: int
    """samples without an end"""
    held_pages: int
    """KV pages not free"""
    buffered: int
    """bytes that wait for readers"""
    tasks: int
    """asyncio tasks"""


def resident_bytes() -> int:
    """Of this process, from /proc; freed memory is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _idle(service: Service) -> int:
    """Pages held once nothing is live any more, or after IDLE_S."""
    held = -1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(IDLE_S):
            while True:
                loads = (await service.pool.info()).replicas
                held = sum(load.total_pages - load.free_pages for load in loads)
                if service.pool.num_live == 0 and held == 0 and not any(r.running or r.waiting for r in loads):
                    break
                await asyncio.sleep(0.02)
    return held


async def _measure(service: Service) -> dict[str, int]:
    held = await _idle(service)
    return {
        "rss": resident_bytes(),
        "live": service.pool.num_live,
        "held_pages": held,
        "buffered": service.pool._buffers.waiting_bytes,
        "tasks": len(asyncio.all_tasks()),
    }


@contextlib.asynccontextmanager
async def _timed(settings: Settings, in_process: bool) -> AsyncIterator[tuple[Service, Clock]]:
    """A service with a clock around all its calls."""
    clock, inner = Clock(), rollout.server.standard_interceptors
    with mock.patch.object(rollout.server, "standard_interceptors", lambda *more: (clock, *inner(*more))):
        async with running_service(settings, in_process=in_process) as service:
            watching = asyncio.create_task(clock.watch())
            yield service, clock
            watching.cancel()


async def _serve(settings: Settings, in_process: bool) -> None:
    loop = asyncio.get_running_loop()
    async with _timed(settings, in_process) as (service, clock):
        settle_heap()
        print(f"ready {service.address.rpartition(':')[2]}", flush=True)
        while True:
            match (await loop.run_in_executor(None, sys.stdin.readline)).strip():
                case "measure":
                    answer: Any = await _measure(service)
                case "live":
                    answer = service.pool.num_live
                case "times":
                    answer = asdict(clock.take())
                case _:
                    return
            print(json.dumps(answer), flush=True)


class Child:
    """The other end."""

    def __init__(self, settings: dict[str, Any], log: Path, *, in_process: bool = True) -> None:
        self.log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.child", json.dumps(settings), str(int(in_process))],
                cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        words = self._line().split()
        assert words[:1] == ["ready"], f"{words}: {log.read_text()[-2000:]}"
        self.address = f"127.0.0.1:{words[1]}"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def _ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def measure(self) -> Reading:
        """Once it is idle."""
        return Reading(**self._ask("measure"))

    def live(self) -> int:
        """Samples without an end, now."""
        return int(self._ask("live"))

    def times(self) -> Times:
        """What its clock measured since the last time."""
        return Times(**self._ask("times"))

    def close(self) -> int:
        """End it; its exit code. May be called again."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("quit\n")
            self._process.stdin.close()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def child_settings(folder: Path, *, server: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    """A tiny model with a short context, so that unlimited requests end soon."""
    model = folder / "model"
    if not model.exists():
        tiny_model("qwen3", model)
    sizes = {"page_size": 16, "kv_cache_tokens": 4096, "max_batch_tokens": 64, "max_running": 8, "chunk_size": 24}
    return {
        "model": {"path": str(model), "dtype": "float32", "context_length": 96},
        "engine": sizes | engine,
        "worker": {"start_timeout_s": 600},
        "server": {"port": 0, "max_n": 16} | (server or {}),
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    asyncio.run(_serve(Settings.model_validate(json.loads(sys.argv[1])), sys.argv[2] == "1"))
