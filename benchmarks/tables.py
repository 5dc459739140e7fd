"""Results as grids of text, for the terminal and for Markdown alike. Pure: results in, text out."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.catalogue import BASELINE
from benchmarks.curves import CURVE_RUNNERS, CURVES, REPLICA_RUNNERS, REPLICA_WORKLOAD, Curve
from benchmarks.models import TITLES
from benchmarks.results import Pair, Results, Spread
from benchmarks.workloads import Workload

QUIET_CORES = 0.25
"""Figures taken while the rest of the machine used more are marked."""
ENGINES = ("vllm", "sglang", "hf")
"""Other people's engines, in the order of the tables."""
LABELS = {
    BASELINE: "zerodrift",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "hf": "HF generate",
    "floor": "GEMMs alone",
}
HEADS = {"n1": "N = 1", "n8": "N = 8", "n32": "N = 32", "grpo": "GRPO 8 x 8", "long": "long"}


@dataclass(frozen=True, slots=True)
class Grid:
    """A table."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """First column to the left, the rest to the right."""
        lines = [self.head, ("---", *("--:" for _ in self.head[1:])), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float) -> str:
    """Three significant digits, thousands with a comma."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def gibibytes(size: float) -> str:
    """With one decimal."""
    return f"{size / 2**30:.1f}"


def _range(value: Spread, unit: str = "x") -> str:
    return f"{value.median:.2f}{unit} ({value.low:.2f}-{value.high:.2f})"


def _mark(pair: Pair) -> str:
    return "°" if pair.foreign_cpu > QUIET_CORES else ""


def speed_grid(results: Results) -> Grid:
    """Tokens per second of every engine, and how many times as fast zerodrift was beside it."""
    works = results.workloads()
    rows = [_own_row(results, works)]
    for runner in ENGINES:
        if runner in results.runners:
            pairs = [results.pair(runner, w.name) for w in works]
            rows.append((results.runners[runner]["title"], *map(_speed_cell, pairs), _memory(pairs)))
    heads = (HEADS.get(w.name, w.name) for w in works)
    return Grid(TITLES[results.model], ("generated tokens/s", *heads, "peak GiB"), tuple(rows))


def _own_row(results: Results, works: list[Workload]) -> tuple[str, ...]:
    rates = [results.ours(w.name, lambda m: m.rate) for w in works]
    peaks = [results.ours(w.name, lambda m: m.peak_bytes) for w in works]
    peak = max((p.high for p in peaks if p is not None), default=0.0)
    return ("**zerodrift**", *(f"**{number(r.median)}**" if r else "-" for r in rates), gibibytes(peak))


def _speed_cell(pair: Pair | None) -> str:
    if pair is None:
        return "-"
    if not pair.turns:
        return "failed"
    return f"{number(pair.rate.median)}{_mark(pair)}, {_range(pair.ratio)}"


def _memory(pairs: list[Pair | None]) -> str:
    peaks = [pair.peak_bytes for pair in pairs if pair is not None and pair.turns]
    return gibibytes(max(peaks)) if peaks else "-"


_COSTS = (
    ("inexact", "zerodrift's share of its own speed with nothing exact forced", False),
    ("digests", "with row digests, share of the speed without", True),
    ("service", "whole service (Ray, gRPC), share of the bare engine", True),
    ("floor", "share of the floor: time of the necessary GEMMs alone", False),
)


def cost_grid(results: Results) -> Grid:
    """zerodrift beside variants of itself and beside the floor."""
    works = results.workloads()
    rows = []
    for runner, title, inverse in _COSTS:
        if runner in results.runners:
            cells = [_share_cell(results.pair(runner, w.name), inverse) for w in works]
            rows.append((title, *cells))
    return Grid(TITLES[results.model], ("", *(HEADS.get(w.name, w.name) for w in works)), tuple(rows))


def _share_cell(pair: Pair | None, inverse: bool) -> str:
    if pair is None:
        return "-"
    if not pair.turns:
        return "failed"
    ratio = pair.ratio
    if inverse:
        ratio = Spread(1 / ratio.median, 1 / ratio.high, 1 / ratio.low)
    percents = (round(100 * v) for v in (ratio.median, ratio.low, ratio.high))
    middle, low, high = percents
    return f"{middle} % ({low}-{high}){_mark(pair)}"


def curve_grid(results: Results, curve: Curve) -> Grid:
    """One row a point: zerodrift, then the others, speed and peak memory."""
    runners = [r for r in CURVE_RUNNERS if r in results.runners]
    heads = [f"{LABELS[r]} tokens/s" for r in runners]
    memory = [f"{LABELS[r]} GiB" for r in runners if r != "floor"]
    rows = []
    for work, value in zip(curve.workloads, curve.values, strict=True):
        rate = results.ours(work.name, lambda m: m.rate)
        peak = results.ours(work.name, lambda m: m.peak_bytes)
        if rate is None or peak is None:
            continue
        pairs = {r: results.pair(r, work.name) for r in runners}
        speeds = [number(p.rate.median) + _mark(p) if p is not None and p.turns else "-" for p in pairs.values()]
        sizes = [_memory([p]) for r, p in pairs.items() if r != "floor"]
        rows.append((f"{value:g}", number(rate.median), *speeds, gibibytes(peak.high), *sizes))
    return Grid(curve.title, (curve.axis, "zerodrift tokens/s", *heads, "zerodrift GiB", *memory), tuple(rows))


def replica_grid(results: Results) -> Grid:
    """The service with one and two replicas."""
    rows = []
    for runner, title in REPLICA_RUNNERS.items():
        pair = results.pair(runner, REPLICA_WORKLOAD.name)
        if pair is not None:
            rate = number(pair.rate.median) + _mark(pair) if pair.turns else "failed"
            rows.append((title, rate, _memory([pair])))
    return Grid(f"service, {REPLICA_WORKLOAD.title}", ("service", "tokens/s", "peak GiB"), tuple(rows))


def all_grids(results: Results) -> list[Grid]:
    """What a run measured, leaving out what it did not."""
    curves = [curve_grid(results, curve) for curve in CURVES.values()] + [replica_grid(results)]
    grids = curves if results.kind == "curves" else [speed_grid(results), cost_grid(results)]
    return [grid for grid in grids if grid.rows]
