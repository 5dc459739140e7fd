"""The planted-fault suite: ``python -m tests.explain.suite`` prints fault, verdict, right or wrong, time."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout.assets import DEFAULT_MODEL, prepare_model, tiny_model
from tests.engines import random_prompt
from tests.explain import (
    faults_inputs,
    faults_modules,
    faults_numerics,
    faults_readings,
    faults_rollout,
    faults_semantics,
    faults_weights,
)
from tests.explain.bench import FAULTS, Bench, Fault, one_thread
from tests.explain.qwen2 import tiny_qwen2
from trainer_bridge.explain.findings import Cause, Explanation
from trainer_bridge.explain.view import verdict

__all__ = ["FAULTS", "Models", "Outcome", "clean_runs", "run_fault"]
_PLANTED = (
    faults_weights, faults_inputs, faults_semantics, faults_readings, faults_numerics, faults_modules, faults_rollout,
)  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One fault explained."""

    fault: Fault
    explanation: Explanation
    cpu_s: float

    @property
    def right(self) -> bool:
        """Class, kind and place named, and what else was asked for said."""
        finding = self.explanation.finding
        return (
            finding.cause is self.fault.cause
            and re.search(self.fault.kind, finding.kind) is not None
            and re.search(self.fault.place, finding.place) is not None
            and re.search(self.fault.words, finding.sentence) is not None
        )


REAL = {
    "one stale tensor": {},
    "positions counted from the left padding, not on record": {},
    "temperature rounded to bfloat16": {},
    "the sampled EOS masked": {},
    "one norm's eps, in bfloat16": {},
    "RoPE theta": {"words": "theta 1e\\+06 instead of 100000"},
    "SDPA instead of flash attention, in bfloat16": {"place": r"layers\.\d+\.attention"},
    "fused add_rms_norm: one rounding less": {},
    "unpadded product at few rows, trainer": {"place": r"layers\.\d+\.o_proj"},
    "GELU instead of SiLU": {},
    "RoPE by neighbours instead of halves": {},
    "norm with 1 + weight": {},
    "a layer skipped": {},
    "dropout left on": {},
    "packed sequences attend to their neighbours": {},
    "the stock forward in place of the aligned one": {},
    "two layers in each other's place": {},
    "one id changed by encoding again, not on record": {},
    "the prompt cut at the right, not on record": {},
    "decoded tokens at positions one too high": {},
    "log-probs rounded to bfloat16 on the wire": {},
    "a record that neither side computes": {},
}
"""Faults that are planted in SmolLM2-135M-Instruct too, and what reads otherwise there."""


def real_faults() -> list[Fault]:
    """The faults of ``REAL`` on the real model in bfloat16."""
    return [
        dataclasses.replace(fault, model="smollm2-bf16", **REAL[fault.name]) for fault in FAULTS if fault.name in REAL
    ]


class Models:
    """Folders of the suite's models, made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}

    def bench(self, name: str) -> Bench:
        """A fresh pair of sides on "qwen3-fp32" and the like."""
        kind, _, dtype = name.partition("-")
        if kind not in self._paths:
            self._paths[kind] = self._make(kind)
        return Bench(self._paths[kind], DTYPES[dtype], page=128 if kind == "smollm2" else 16)

    def _make(self, kind: str) -> Path:
        target = self._folder / f"tiny-{kind}"
        if kind == "smollm2":
            return prepare_model(DEFAULT_MODEL)
        if kind == "padded":
            return tiny_model("qwen3", target, pad_token_id=2)
        return tiny_qwen2(target) if kind == "qwen2" else tiny_model(kind, target)  # type: ignore[arg-type]


def run_fault(fault: Fault, models: Models) -> Outcome:
    """Plant, explain."""
    bench = models.bench(fault.model)
    mode = bench.rollout.kernels.invariant_mode() if fault.aligned else contextlib.nullcontext()
    with torch.no_grad(), mode:
        case = fault.plant(bench)
    start = time.process_time()
    explanation = bench.explain(case)
    return Outcome(fault, explanation, time.process_time() - start)


def clean_runs(models: Models, count: int) -> Iterator[Explanation]:
    """Explanations of sound pairs, of every model, temperature, filter, length and company. None may find anything.

    Every question is asked, although all log-probs are equal.
    """
    kinds = ("qwen3-fp32", "llama-bf16", "qwen3-bf16", "llama-fp32", "qwen2-fp32")
    settings: tuple[dict[str, float], ...] = (
        {},
        {"temperature": 1.0},
        {"top_k": 7},
        {"temperature": 0.0},
        {"top_p": 0.8},
    )
    benches = {kind: models.bench(kind) for kind in kinds}
    for i in range(count):
        bench = benches[kinds[i % len(kinds)]]
        record = bench.record(random_prompt(1 + (7 * i) % 40, i, bench.vocab), seed=i, **settings[(i // 5) % 5])
        company = tuple(random_prompt(3 + i % 5, 900 + i) for _ in range(i % 3))
        with bench.rollout.kernels.invariant_mode():
            values = bench.score(record, company=company)
        yield bench.explain(bench.case(record, values, trainer_company=company), thorough=True)


def mean_seconds(outcomes: list[Outcome], *, real: bool) -> float:
    """Mean processor seconds of a verdict on the real model, or on the tiny ones."""
    found = [o.cpu_s for o in outcomes if o.fault.model.startswith("smollm2") == real]
    return sum(found) / len(found)


def main() -> int:
    """Print the table; 1 when a verdict is wrong too often or a clean run raises an alarm."""
    console = Console(width=200 if not sys.stdout.isatty() else None)
    table = Table(title="planted faults")
    for column in ("fault", "model", "verdict", "", "cpu s"):
        table.add_column(column)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, one_thread():
        models = Models(Path(folder))
        for fault in [*FAULTS, *real_faults()]:
            outcome = run_fault(fault, models)
            outcomes.append(outcome)
            print(f"{len(outcomes)}: {fault.name} ({fault.model}): {outcome.right}", file=sys.stderr, flush=True)
            mark = Text("right", style="green") if outcome.right else Text("WRONG", style="bold red")
            table.add_row(fault.name, fault.model, Text(verdict(outcome.explanation)), mark, f"{outcome.cpu_s:.2f}")
        alarms = [e for e in clean_runs(models, 100) if e.cause is not Cause.NONE]
    console.print(table)
    right = sum(o.right for o in outcomes)
    console.print(
        f"{right} of {len(outcomes)} verdicts right ({100 * right / len(outcomes):.1f} %), {len(alarms)} false alarms "
        f"in 100 clean runs; mean CPU s a verdict: {mean_seconds(outcomes, real=False):.2f} tiny models, "
        f"{mean_seconds(outcomes, real=True):.2f} SmolLM2"
    )
    for alarm in alarms:
        console.print(verdict(alarm), style="red")
    return 0 if right >= 0.95 * len(outcomes) and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
