"""The whole service: ``zerodrift serve`` in a process of its own (Ray, replicas, gRPC), asked by the bridge."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import re
import subprocess
import sys
from typing import Any

import ray
import torch

from benchmarks.drivers.channel import Job, Sample, serve
from benchmarks.limits import MAX_RUNNING
from rollout.types import GenerateRequest, SamplingParams
from trainer_bridge.aio_client import AsyncRolloutClient

_ADDRESS = re.compile(r"(127\.0\.0\.1:\d+)")
_STOP_S = 20.0


class ServiceEngine:
    """Server and client; one stream a prompt, all at once."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._replicas: int = config.get("replicas", 1)
        self._threads: int = config.get("threads_per_replica", config["threads"])
        settings = {
            "model.path": config["model"],
            "engine.threads": self._threads,
            "engine.kv_cache_tokens": config["kv_tokens"],
            "engine.max_running": MAX_RUNNING,
            "worker.count": self._replicas,
            "worker.num_cpus": 1,
            "worker.start_timeout_s": 900,
            "server.port": 0,
        }
        command = [sys.executable, "-m", "rollout", "serve", *(f"{key}={value}" for key, value in settings.items())]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        atexit.register(self._stop)
        self._address = self._wait_for_address()
        self._loop = asyncio.new_event_loop()
        self._client = AsyncRolloutClient(self._address, timeout_s=3600.0)

    def facts(self) -> dict[str, Any]:
        """Versions and sizes."""
        return {
            "torch": torch.__version__,
            "ray": ray.__version__,
            "replicas": self._replicas,
            "threads_per_replica": self._threads,
            "client": "trainer_bridge.aio_client",
        }

    def run(self, job: Job) -> list[Sample]:
        """One Generate call a prompt."""
        requests = [
            GenerateRequest(
                "",
                tuple(prompt),
                SamplingParams(seed=job.seed * 100_000 + i, max_tokens=job.new_tokens, ignore_eos=True),
                n=job.samples,
            )
            for i, prompt in enumerate(job.prompts)
        ]
        many = self._client.generate_many(requests, concurrency=len(requests))
        results = self._loop.run_until_complete(many)
        return [(s.token_ids.tolist(), s.policy_logprobs.tolist()) for result in results for s in result.samples]

    def _wait_for_address(self) -> str:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            found = _ADDRESS.search(line)
            if found:
                return found.group(1)
        raise RuntimeError(f"zerodrift serve ended with exit code {self._server.wait()} before it was ready")

    def _stop(self) -> None:
        self._server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(_STOP_S)


if __name__ == "__main__":
    serve(ServiceEngine)
