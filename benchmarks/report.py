"""Results as a table on the terminal."""

from __future__ import annotations

from rich.table import Table

from benchmarks.catalogue import BASELINE
from benchmarks.models import TITLES
from benchmarks.results import Pair, Results


def results_table(results: Results) -> Table:
    """Tokens per second, and how many times faster zerodrift was in the paired turns."""
    table = Table(title=f"{TITLES[results.model]}: generated tokens/s (zerodrift's speed over it: median, lowest - highest)")
    workloads = results.workloads()
    for column in ("", *(f"{w.name}\n{w.title}" for w in workloads), "peak GiB"):
        table.add_column(column, justify="left" if not column else "right")
    ours = [results.ours(w.name, lambda m: m.rate) for w in workloads]
    peaks = [results.ours(w.name, lambda m: m.peak_bytes) for w in workloads]
    peak = max((p.high for p in peaks if p is not None), default=0.0)
    table.add_row("zerodrift", *(f"{rate.median:.1f}" if rate else "" for rate in ours), f"{peak / 2**30:.1f}")
    for name, record in results.runners.items():
        if name == BASELINE:
            continue
        pairs = [results.pair(name, w.name) for w in workloads]
        measured = [pair.peak_bytes for pair in pairs if pair is not None and pair.turns]
        memory = f"{max(measured) / 2**30:.1f}" if measured else ""
        table.add_row(record["title"], *map(_cell, pairs), memory)
    for name, record in results.runners.items():
        if "failure" in record:
            table.caption = f"{table.caption or ''}{name} failed: {record['failure']}\n"
    return table


def _cell(pair: Pair | None) -> str:
    if pair is None:
        return ""
    if not pair.turns:
        return "failed"
    ratio = pair.ratio
    return f"{pair.rate.median:.1f}\n{ratio.median:.2f}x ({ratio.low:.2f} - {ratio.high:.2f})"
