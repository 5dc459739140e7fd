"""The benchmark's side of the conversation: a runner is an engine in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.meters import UsageMeter, peak_bytes, process_tree, reset_peak

START_TIMEOUT_S = 1800.0
RUN_TIMEOUT_S = 3600.0
STOP_TIMEOUT_S = 30.0


class RunnerFailed(Exception):
    """An engine could not be started, failed at its work, or took too long. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One job by one runner."""

    seconds: float
    tokens: int
    """generated"""
    own_cpu: float
    """cores that the runner's processes kept busy"""
    other_cpu: float
    """cores that everything else on the machine kept busy"""
    peak_bytes: int
    """sum of VmHWM over the runner's processes, from their start or the last reset"""
    mean_logprob: float | None = None
    """None from a runner that samples nothing"""

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """How a kind of runner is started."""

    name: str
    title: str
    module: str
    """driver, run with -m"""
    python: Path
    """interpreter of the runner's environment"""
    config: Mapping[str, Any] = field(default_factory=dict)
    """in addition to what every driver is told"""
    environment: Mapping[str, str] = field(default_factory=dict)
    python_path: tuple[Path, ...] = ()
    sleeps: bool = True
    """whether it blocks when idle; one that polls is stopped (SIGSTOP) outside of its turns"""


class Runner:
    """A running engine. ``close`` must follow; it ends every process that the runner started."""

    def __init__(self, spec: RunnerSpec, config: Mapping[str, Any], log: Path) -> None:
        self.spec = spec
        self.facts: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = json.dumps({**config, **spec.config})
        environment = os.environ | dict(spec.environment)
        environment["PYTHONPATH"] = os.pathsep.join(map(str, spec.python_path))
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(spec.python), "-m", spec.module, arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                # A group of its own: an interrupt at the terminal reaches the benchmark alone, which then closes it.
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Return when the engine has loaded.

        Raises:
            RunnerFailed: it could not.
        """
        ready = self._answer(START_TIMEOUT_S)
        self.facts, self.environment = ready["facts"], ready["environment"]
        self._pause()

    def run(self, job: Mapping[str, Any]) -> Measurement:
        """Have a job done.

        Raises:
            RunnerFailed: it was not.
        """
        self._resume()
        meter = UsageMeter(self._process.pid)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RunnerFailed(self._reason(f"gone ({error.strerror})")) from error
        answer = self._answer(RUN_TIMEOUT_S)
        usage = meter.read()
        measured = Measurement(
            answer["seconds"],
            answer["tokens"],
            usage.own,
            usage.others,
            peak_bytes(self._process.pid),
            answer["mean_logprob"],
        )
        self._pause()
        return measured

    def reset_peak(self) -> None:
        """Let ``Measurement.peak_bytes`` start anew at the present size."""
        reset_peak(self._process.pid)

    def close(self) -> None:
        """End the input, wait, then end what is left of the process tree."""
        self._resume()
        tree = process_tree(self._process.pid)
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        for process in tree:
            # psutil compares start times, so a process that took over an id is safe.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _pause(self) -> None:
        if not self.spec.sleeps:
            self._signal(signal.SIGSTOP)

    def _resume(self) -> None:
        if not self.spec.sleeps:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in process_tree(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise RunnerFailed(self._reason(f"no answer within {timeout_s:.0f} s"))
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise RunnerFailed(self._reason(f"ended with exit code {self._process.returncode}"))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunnerFailed(answer["error"])
        return answer

    def _reason(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"{what}; last words: {lines[-1][:300]}" if lines else what
