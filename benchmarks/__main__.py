"""``make bench``: zerodrift against Hugging Face generate, in turn on the same weights and prompts."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.workload import HuggingFaceRunner, Workload, ZerodriftRunner
from rollout.assets import prepare_model


def measure(runners: list[Any], work: Workload, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of every runner, taken A B C A B C so that drift of the machine hits all alike."""
    rates: dict[str, list[float]] = {r.name: [] for r in runners}
    for _ in range(rounds):
        for runner in runners:
            start = time.perf_counter()
            tokens = runner.run(work)
            rates[runner.name].append(tokens / (time.perf_counter() - start))
    return rates


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results.json"))
    args = parser.parse_args()
    path = prepare_model("smollm2-135m-instruct")
    ours = ZerodriftRunner(path, threads=args.threads)
    others = [
        HuggingFaceRunner(path, threads=args.threads),
        ZerodriftRunner(path, threads=args.threads, invariant=False),
        ZerodriftRunner(path, threads=args.threads, digests=True),
    ]
    runners = [ours, *others]
    for runner in runners:
        runner.run(Workload(2, new_tokens=4))
    table = Table(title="tokens per second, 128 prompt + 128 new tokens, bfloat16, log-probs on")
    for column in ("sequences", *(r.name for r in runners)):
        table.add_column(column, justify="right")
    results: list[dict[str, Any]] = []
    for n in args.sequences:
        rates = measure(runners, Workload(n), args.rounds)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        cells = [f"{m:.0f} ({medians[ours.name] / m:.2f}x)" for m in medians.values()]
        table.add_row(str(n), *cells)
        results.append({"sequences": n, "tokens_per_s": rates})
    Console(width=140).print(table)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": args.threads,
        "load": os.getloadavg()[0],
        "date": datetime.date.today().isoformat(),
    }
    args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
