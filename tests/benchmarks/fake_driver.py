"""An engine that answers at once, wrongly or not at all, as its configuration says."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.drivers.channel import Job, Sample, serve


class FakeEngine:
    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._jobs = 0
        if "refuse" in config:
            raise ValueError(config["refuse"])

    def facts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "told": self._config.get("told", "")}

    def run(self, job: Job) -> list[Sample]:
        self._jobs += 1
        # Engines print; only answers may reach the benchmark.
        print("noise on standard output")
        if self._jobs == self._config.get("exit_at"):
            os._exit(3)
        count = job.new_tokens - self._config.get("short", 0)
        logprob = self._config.get("logprob", -1.0)
        return [([7] * count, [logprob] * count)] * (len(job.prompts) * job.samples)


if __name__ == "__main__":
    serve(FakeEngine)
