"""Taking turns: zerodrift, then each other runner, again and again, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.catalogue import BASELINE
from benchmarks.models import read_config
from benchmarks.results import Pair, Results
from benchmarks.runner import Measurement, Runner, RunnerFailed, RunnerSpec
from benchmarks.workloads import PAGE, Workload

_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure of one model."""

    folder: Path
    """of the model"""
    workloads: tuple[Workload, ...]
    rounds: int
    threads: int
    session: str
    """key of this run in ``Results.sessions``"""
    out: Path
    """file of the results"""
    logs: Path
    """folder of the runners' standard error"""
    peak_per_workload: bool = False
    """take peak memory from the start of each workload on, instead of from the start of the engine on"""


def driver_config(plan: Plan) -> dict[str, Any]:
    """What every driver is told."""
    model = read_config(plan.folder)
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    per_token = 2 * 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * head_dim
    tokens = max(work.kv_tokens for work in plan.workloads)
    return {
        "model": str(plan.folder),
        "threads": plan.threads,
        "kv_tokens": tokens,
        "kv_bytes": tokens * per_token,
        "max_length": max(-(-work.length // PAGE) * PAGE for work in plan.workloads),
        "max_sequences": max(work.sequences for work in plan.workloads),
    }


class Measurer:
    """Runs blocks of a plan into results, which are saved after every turn."""

    def __init__(self, plan: Plan, results: Results) -> None:
        self._plan = plan
        self._results = results
        self._config = driver_config(plan)
        self._vocab: int = read_config(plan.folder)["vocab_size"]
        self._turn = 0

    def block(self, baseline: RunnerSpec, others: Sequence[RunnerSpec]) -> None:
        """Measure runners that fit into memory together. One that fails is recorded with the reason, the rest go on.

        Raises:
            RunnerFailed: zerodrift itself failed.
        """
        with self._running(baseline) as ours:
            if ours is None:
                raise RunnerFailed(f"zerodrift: {self._results.runners[BASELINE]['failure']}")
            open_runners: list[Runner] = []
            try:
                for spec in others:
                    runner = self._start(spec)
                    if runner is not None:
                        open_runners.append(runner)
                for work in self._plan.workloads:
                    self._take_turns(work, ours, open_runners)
            finally:
                for runner in open_runners:
                    runner.close()

    @contextmanager
    def _running(self, spec: RunnerSpec) -> Iterator[Runner | None]:
        runner = self._start(spec)
        try:
            yield runner
        finally:
            if runner is not None:
                runner.close()

    def _start(self, spec: RunnerSpec) -> Runner | None:
        """The runner, ready; None when it is not, with the reason in the results."""
        record: dict[str, Any] = {"title": spec.title}
        self._results.runners[spec.name] = record
        begin = time.perf_counter()
        if not spec.python.exists():
            self._fail(spec, "its environment is not here: make bench-peers")
            return None
        say(f"  starting {spec.title}")
        runner = Runner(spec, self._config, self._plan.logs / f"{self._results.model}-{spec.name}.log")
        try:
            runner.wait_ready()
        except BaseException as error:
            runner.close()
            if not isinstance(error, RunnerFailed):
                raise
            self._fail(spec, str(error))
            return None
        record |= {
            "start_seconds": round(time.perf_counter() - begin, 1),
            "facts": runner.facts,
            "environment": runner.environment,
        }
        return runner

    def _fail(self, spec: RunnerSpec, reason: str) -> None:
        say(f"  {spec.title} failed: {reason}")
        self._results.runners[spec.name]["failure"] = reason
        for work in self._plan.workloads:
            pair = Pair(spec.name, work, self._plan.session, failure=reason)
            self._results.pairs[f"{spec.name}/{work.name}"] = pair
        self._results.save(self._plan.out)

    def _take_turns(self, work: Workload, ours: Runner, others: list[Runner]) -> None:
        pairs = {r.spec.name: Pair(r.spec.name, work, self._plan.session) for r in others}
        alive = list(others)
        warm_up = replace(work, new_tokens=_WARM_UP_TOKENS)
        if self._plan.peak_per_workload:
            for runner in (ours, *others):
                runner.reset_peak()
        for turn in range(self._plan.rounds + 1):
            job = (work if turn else warm_up).job(self._vocab, self._next_turn())
            mine = ours.run(job)
            for runner in list(alive):
                name = runner.spec.name
                try:
                    theirs = runner.run(job)
                except RunnerFailed as error:
                    pairs[name].failure = str(error)
                    say(f"  {runner.spec.title} failed at {work.title}: {error}")
                    alive.remove(runner)
                else:
                    if turn:
                        pairs[name].turns.append((mine, theirs))
                if turn or pairs[name].failure:
                    self._results.pairs[f"{name}/{work.name}"] = pairs[name]
            if turn:
                self._results.save(self._plan.out)
                say(_progress(work, turn, mine, {n: p.turns[-1][1] for n, p in pairs.items() if len(p.turns) == turn}))

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn


def _progress(work: Workload, turn: int, mine: Measurement, others: dict[str, Measurement]) -> str:
    figures = [f"{BASELINE} {mine.rate:.1f}"]
    figures += [f"{name} {m.rate:.1f} ({mine.rate / m.rate:.2f}x)" for name, m in others.items()]
    foreign = max(m.other_cpu for m in (mine, *others.values()))
    return f"  {work.name} round {turn}: {', '.join(figures)} tokens/s; others' CPU <= {foreign:.2f} cores"


def say(text: str) -> None:
    """A line of progress, at once."""
    print(time.strftime("%H:%M:%S"), text, flush=True)
