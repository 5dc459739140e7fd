"""``make bench``: zerodrift beside other engines, in turn, on the same weights and prompts."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.catalogue import BASELINE, BLOCKS, Options, runner_specs
from benchmarks.curves import CURVE_RUNNERS, CURVES, REPLICA_RUNNERS, REPLICA_WORKLOAD
from benchmarks.machine import session
from benchmarks.measure import Measurer, Plan, say
from benchmarks.models import TITLES, model_folder
from benchmarks.report import print_results
from benchmarks.results import Results, load_results
from benchmarks.runner import RunnerFailed, RunnerSpec
from benchmarks.workloads import STANDARD, Workload

QUICK = ("n1", "n8", "n32")
_RUNNERS = tuple(name for block in BLOCKS for name in block)
_TOO_SLOW = {("06b", "hf"), ("06b", "sglang")}
"""(model, runner) that stay with the quick workloads: on the others they take an hour, or more memory than there is."""


def arguments() -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--models", "--model", nargs="+", choices=sorted(TITLES), default=["110m"])
    parser.add_argument("--runners", nargs="+", choices=_RUNNERS, default=list(_RUNNERS), help="beside zerodrift")
    parser.add_argument("--workloads", nargs="+", choices=list(STANDARD), default=list(QUICK))
    parser.add_argument("--curves", nargs="*", choices=[*CURVES, "replicas"], help="growth curves instead; none = all")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each pair, after a short one to warm up")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="environments of the other engines")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of results and logs")
    return parser.parse_args()


class Session:
    """One run of the benchmark over one model; figures that are not measured anew stay in the file as they were."""

    def __init__(self, model: str, kind: str, args: argparse.Namespace) -> None:
        say(f"{TITLES[model]}: preparing the model")
        self._folder = model_folder(model)
        self._args = args
        self._specs = runner_specs(Options(args.threads, args.peers.absolute()))
        self._out: Path = args.out / (f"{model}.json" if kind == "engines" else f"{model}-{kind}.json")
        self.results = load_results(self._out) if self._out.exists() else Results(model, kind)
        self._key = time.strftime("%Y-%m-%dT%H:%M:%S")
        self.results.sessions[self._key] = session(args.threads)

    def measure(self, workloads: tuple[Workload, ...], runners: tuple[str, ...], *, each_peak: bool = False) -> None:
        """zerodrift beside runners that fit into memory together."""
        args = self._args
        plan = Plan(
            self._folder, workloads, args.rounds, args.threads, self._key, self._out, args.out / "logs", each_peak
        )
        others: list[RunnerSpec] = [self._specs[name] for name in runners]
        say(f"{TITLES[self.results.model]}: zerodrift beside {'; '.join(spec.title for spec in others)}")
        Measurer(plan, self.results).block(self._specs[BASELINE], others)


def measure_engines(model: str, args: argparse.Namespace) -> Results:
    """The standard workloads, block by block."""
    run = Session(model, "engines", args)
    for names, works in _blocks(model, args):
        run.measure(tuple(STANDARD[w] for w in works), names)
    return run.results


def _blocks(model: str, args: argparse.Namespace) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    for block in BLOCKS:
        names = tuple(name for name in block if name in args.runners)
        slow = any((model, name) in _TOO_SLOW for name in names)
        works = [w for w in args.workloads if not slow or w in QUICK]
        if slow and works != args.workloads:
            left_out = ", ".join(w for w in args.workloads if w not in works)
            say(f"{TITLES[model]}: {', '.join(names)} would take too long or too much memory at {left_out}: left out")
        if names and works:
            yield names, works


def measure_curves(model: str, args: argparse.Namespace) -> Results:
    """The growth curves, each with engines sized for it."""
    run = Session(model, "curves", args)
    chosen = args.curves or [*CURVES, "replicas"]
    for name in chosen:
        if name != "replicas":
            run.measure(CURVES[name].workloads, CURVE_RUNNERS, each_peak=True)
    if "replicas" in chosen:
        for runner in REPLICA_RUNNERS:
            run.measure((REPLICA_WORKLOAD,), (runner,))
    return run.results


def main() -> None:
    """Run, keep, print."""
    args = arguments()
    # A termination unwinds like an interrupt, so that no runner stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin = time.perf_counter()
    failed = []
    for model in args.models:
        try:
            results = measure_engines(model, args) if args.curves is None else measure_curves(model, args)
        except RunnerFailed as error:
            say(f"{TITLES[model]}: {error}")
            failed.append(model)
        except KeyboardInterrupt:
            say(f"interrupted; what was measured is kept in {args.out}")
            sys.exit(130)
        else:
            print_results(results)
    say(f"done in {(time.perf_counter() - begin) / 60:.1f} minutes; results and logs are in {args.out}")
    if failed:
        sys.exit(f"zerodrift itself failed on {', '.join(failed)}")


if __name__ == "__main__":
    main()
