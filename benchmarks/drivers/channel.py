"""The engine's side of the conversation: one JSON object a line. Standard library only."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

_RECORDED = ("OMP_", "GOMP_", "KMP_", "MKL_", "VLLM_", "SGLANG_", "NUMBA_")


@dataclass(frozen=True)
class Job:
    """One measured piece of work."""

    prompts: list[list[int]]
    """[P][tokens]"""
    samples: int
    """continuations of each prompt"""
    new_tokens: int
    """of each continuation, exactly"""
    seed: int


Sample = tuple[list[int], list[float]]
"""Generated ids and their log-probs."""


class Engine(Protocol):
    """What a driver provides."""

    def facts(self) -> dict[str, Any]:
        """Versions and settings, for the record."""
        ...

    def run(self, job: Job) -> list[Sample] | None:
        """Do the work and return every sample; None from a driver that only takes the time of something."""
        ...


def checked(job: Job, samples: list[Sample]) -> float:
    """Mean log-prob of samples that are complete.

    Raises:
        RuntimeError: a sample, a token or a log-prob is missing, or a log-prob is not one.
    """
    wanted = len(job.prompts) * job.samples
    if len(samples) != wanted:
        raise RuntimeError(f"{len(samples)} samples came back, {wanted} were asked for")
    total = 0.0
    for ids, logprobs in samples:
        if len(ids) != job.new_tokens or len(logprobs) != job.new_tokens:
            raise RuntimeError(f"a sample has {len(ids)} ids and {len(logprobs)} log-probs, not {job.new_tokens}")
        if not all(math.isfinite(value) and value <= 0.0 for value in logprobs):
            raise RuntimeError("a log-prob is positive or not finite")
        total += sum(logprobs)
    return total / (wanted * job.new_tokens)


def environment() -> dict[str, str]:
    """The variables that steer threads and engines."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(_RECORDED) and not k.endswith(("PATH", "_ID"))}


def _answers() -> TextIO:
    # Whatever an engine prints goes to standard error; only answers go to the real standard output.
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(start: Callable[[dict[str, Any]], Engine]) -> None:
    """Build the engine from the configuration in the first argument, then answer jobs until the input ends."""
    answers = _answers()

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        engine = start(json.loads(sys.argv[1]))
        send({"facts": engine.facts(), "environment": environment()})
    except BaseException as error:
        traceback.print_exc()
        send({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    for line in sys.stdin:
        try:
            send(_measured(engine, Job(**json.loads(line))))
        except Exception as error:
            traceback.print_exc()
            send({"error": f"{type(error).__name__}: {error}"})


def _measured(engine: Engine, job: Job) -> dict[str, Any]:
    start = time.perf_counter()
    samples = engine.run(job)
    seconds = time.perf_counter() - start
    tokens = len(job.prompts) * job.samples * job.new_tokens
    return {
        "seconds": seconds,
        "tokens": tokens,
        "mean_logprob": None if samples is None else checked(job, samples),
    }
