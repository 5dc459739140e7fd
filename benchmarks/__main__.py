"""``make bench``: zerodrift beside other engines, in turn, on the same weights and prompts."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from rich.console import Console

from benchmarks.catalogue import BASELINE, BLOCKS, Options, runner_specs
from benchmarks.machine import session
from benchmarks.measure import Measurer, Plan, say
from benchmarks.models import TITLES, model_folder
from benchmarks.report import results_table
from benchmarks.results import Results, load_results
from benchmarks.runner import RunnerSpec
from benchmarks.workloads import STANDARD

_RUNNERS = tuple(name for block in BLOCKS for name in block)
QUICK = ("n1", "n8", "n32")


def arguments() -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--models", "--model", nargs="+", choices=sorted(TITLES), default=["110m"])
    parser.add_argument("--runners", nargs="+", choices=[BASELINE, *_RUNNERS], default=list(_RUNNERS))
    parser.add_argument("--workloads", nargs="+", choices=list(STANDARD), default=list(QUICK))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each pair, after one to warm up")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--wait-policy", choices=["PASSIVE", "ACTIVE"], default="PASSIVE", help="zerodrift's OpenMP")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="environments of the other engines")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of results and logs")
    return parser.parse_args()


def measure_model(name: str, args: argparse.Namespace, specs: dict[str, RunnerSpec]) -> Results:
    """Measure one model; figures that are not measured anew stay in the file as they were."""
    say(f"{TITLES[name]}: preparing the model")
    out = args.out / f"{name}.json"
    results = load_results(out) if out.exists() else Results(name)
    key = time.strftime("%Y-%m-%dT%H:%M:%S")
    results.sessions[key] = session(args.threads)
    workloads = tuple(STANDARD[w] for w in args.workloads)
    plan = Plan(model_folder(name), workloads, args.rounds, args.threads, key, out, args.out / "logs")
    measurer = Measurer(plan, results)
    for block in BLOCKS:
        chosen = [specs[runner] for runner in block if runner in args.runners]
        if chosen:
            say(f"{TITLES[name]}: zerodrift beside {', '.join(spec.title for spec in chosen)}")
            measurer.block(specs[BASELINE], chosen)
    return results


def main() -> None:
    """Run, keep, print."""
    args = arguments()
    specs = runner_specs(Options(args.threads, args.peers.absolute(), args.wait_policy))
    begin = time.perf_counter()
    console = Console(width=160)
    for name in args.models:
        console.print(results_table(measure_model(name, args, specs)))
    say(f"done in {(time.perf_counter() - begin) / 60:.1f} minutes; results are in {args.out}")


if __name__ == "__main__":
    main()
