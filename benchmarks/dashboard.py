"""``make bench-dashboard``: 10 million token rows, then how long the page and each view take."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rollout.types import FinishReason, LogprobMode, SamplingParams, VersionSpan
from trainer_bridge.compare import compare
from trainer_bridge.dashboard.serve import bind, page_address, serving_beside
from trainer_bridge.records import ScoredSample
from trainer_bridge.store.facts import RunHead, SampleFacts, StepFacts
from trainer_bridge.store.recorder import Recorder, RecordOptions

CHROMIUM = "/usr/bin/chromium"
VIEWS = ("overview", "distribution", "where", "tokens", "compare", "manifest")
LENGTH = 500
COLUMNS = ("what", "median", "largest", "page's processor time", "server's")
_CPU = ("page_cpu", "server_cpu")


def make_step(rng: np.random.Generator, step: int, samples: int, share: float) -> list[ScoredSample]:
    """``samples`` samples of ``LENGTH`` tokens; a ``share`` of the tokens differs."""
    made = []
    for i in range(samples):
        rollout = (-rng.exponential(1.0, LENGTH)).astype(np.float32)
        noise = rng.normal(0, 0.01, LENGTH) * np.exp(rng.normal(0, 2, LENGTH)) * (rng.random(LENGTH) < share)
        made.append(
            ScoredSample(
                request_id=f"step{step}/prompt{i // 8}",
                sample_index=i % 8,
                prompt_ids=np.arange(64, dtype=np.int32),
                token_ids=rng.integers(0, 49152, LENGTH).astype(np.int32),
                rollout_logprobs=rollout,
                trainer_logprobs=(rollout + noise).astype(np.float32),
                mask=np.ones(LENGTH, np.bool_),
                mode=LogprobMode.TEMPERED,
                temperature=1.0,
                filtered=False,
                finish=FinishReason.LENGTH,
                seed=step,
                spans=(VersionSpan(step, 0, LENGTH),),
                replica=f"replica-{i % 8}",
            )
        )
    return made


def write_run(root: Path, name: str, sibling: str, rows: int, steps: int, share: float) -> dict[str, float]:
    """A run of ``rows`` token rows; seconds to compare and to write."""
    rng = np.random.default_rng(0)
    recorder = Recorder(
        root, RunHead(name, source="benchmark", sibling=sibling, manifest={"kernels.name": "cpu"}),
        options=RecordOptions(keep_rate=1.0, queued_steps=2),
    )  # fmt: skip
    per_step = rows // steps // LENGTH
    compare_s = write_s = 0.0
    for step in range(steps):
        samples = make_step(rng, step, per_step, share)
        start = time.perf_counter()
        comparison = compare(samples)
        compare_s += time.perf_counter() - start
        rewards = tuple(rng.random(per_step).tolist())
        start = time.perf_counter()
        facts = [SampleFacts(SamplingParams(seed=step), reward) for reward in rewards]
        recorder.record(StepFacts(step, step, "", rewards, {"rollout": 10.0}), samples, comparison, facts)
        while recorder.totals().waiting:
            threading.Event().wait(0.002)
        write_s += time.perf_counter() - start
    totals = recorder.close()
    if totals.dropped:
        raise SystemExit(f"{totals.dropped} steps were not written: {totals.last_error}")
    return {"compare_s": compare_s, "write_s": write_s, "bytes": float(totals.bytes)}


@contextmanager
def served(root: Path) -> Iterator[str]:
    """A fresh server of ``root``; its address."""
    listener = bind("127.0.0.1", 0)
    with serving_beside(root, listener, token=None):
        yield page_address(listener, None)


@dataclass(slots=True)
class Times:
    """Milliseconds by name, one a round."""

    clock: dict[str, list[float]] = field(default_factory=dict)
    """from the click to the drawn charts"""
    page_cpu: dict[str, list[float]] = field(default_factory=dict)
    """processor time of the page's main thread: what a loaded machine does not change much"""
    server_cpu: dict[str, list[float]] = field(default_factory=dict)
    """processor time of this process, which is the server's and a little of the driver's"""


def measure(address: str, run: str, other: str, rounds: int) -> Times:
    """The first paint, the first verdict and each view."""
    from playwright.sync_api import sync_playwright

    times = Times()

    def note(name: str, value: float) -> None:
        times.clock.setdefault(name, []).append(value)

    def view(page: Any, cpu: Any, name: str, address: str) -> None:
        page_before, server_before = cpu(), time.process_time()
        note(name, page.evaluate(_TIMED, address))
        times.page_cpu.setdefault(name, []).append(cpu() - page_before)
        times.server_cpu.setdefault(name, []).append((time.process_time() - server_before) * 1e3)

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(rounds):
            page = browser.new_context(viewport={"width": 1280, "height": 860}).new_page()
            page.goto(f"{address}?run={run}", wait_until="commit")
            page.wait_for_selector("body[data-ready=true]")
            note("first paint", page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            note("the verdict painted", page.evaluate(_VERDICT))
            note("charts drawn", page.evaluate("performance.getEntriesByName('drawn')[0].startTime"))
            cpu = _page_cpu(page)
            for name in VIEWS:
                suffix = f"&with={other}" if name == "compare" else ""
                view(page, cpu, name, f"?run={run}&view={name}{suffix}")
            view(page, cpu, "one step", f"?run={run}&view=where&step=7")
            view(page, cpu, "one sample", f"?run={run}&view=sample&step=7&request=step7/prompt0&index=0")
            view(page, cpu, "run list", "?")
            page.context.close()
        browser.close()
    return times


def _page_cpu(page: Any) -> Callable[[], float]:
    """Reads the processor time, ms, that the page's main thread has used."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def read() -> float:
        metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        return float(metrics["TaskDuration"]) * 1e3

    return read


_VERDICT = """() => new Promise((done) => new PerformanceObserver((seen) => done(seen.getEntries()[0].renderTime))
  .observe({ type: "element", buffered: true }))"""

_TIMED = """async (address) => {
  const link = document.createElement('a');
  link.href = address; link.dataset.link = ''; document.body.append(link);
  const start = performance.now();
  link.click(); link.remove();
  while (document.body.dataset.ready !== 'true') await new Promise(requestAnimationFrame);
  return performance.now() - start;
}"""


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """Cells of ``COLUMNS`` for every thing measured; docs/dashboard.md shows the same."""
    found = result["milliseconds"]
    rows = []
    for name, values in found["clock"].items():
        cpu = [statistics.median(found[kind][name]) if name in found[kind] else None for kind in _CPU]
        middle, most = (f"{value:.0f}" for value in (statistics.median(values), max(values)))
        rows.append([name, middle, most, *("" if value is None else f"{value:.0f}" for value in cpu)])
    return rows


def main() -> None:
    """Make the runs, measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.3, help="share of tokens that differ")
    parser.add_argument("--runs", type=Path, help="use, or make and keep, runs here")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/dashboard.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = args.runs or Path(folder)
        written: dict[str, Any] = {}
        if not (root / "run=big").exists():
            written = write_run(root, "big", "small", args.rows, args.steps, args.share)
            write_run(root, "small", "big", args.rows // 20, args.steps // 2, 0.0)
        with served(root) as address:
            times = measure(address, "big", "small", args.rounds)
    machine = {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "load": os.getloadavg()}
    result = {"machine": machine, "rows": args.rows, "steps": args.steps, "written": written}
    result["milliseconds"] = asdict(times)
    table = Table(title=f"{args.rows:,} token rows in {args.steps} steps, milliseconds")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column != "what" else "left")
    for cells in rows_of(result):
        table.add_row(*cells)
    Console().print(table)
    print(written)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
