"""The page shows what the benchmark of the dashboard measured, and what it measured is fast enough."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dashboard import VIEWS, rows_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/dashboard.json").read_text())
    return found


def test_the_page_shows_the_figures(result: dict[str, Any]) -> None:
    pages = [(ROOT / f"docs/{folder}dashboard.md").read_text(encoding="utf-8") for folder in ("", "zh/")]
    for cells in rows_of(result):
        assert all(f"| {' | '.join(cells)} |" in page for page in pages), "make bench-dashboard, then both pages"
    assert all(f"{result['rows']:,}" in page for page in pages)


def test_the_aims_are_met(result: dict[str, Any]) -> None:
    assert result["rows"] >= 10_000_000 and result["machine"]["cpus"] <= 2
    medians = {name: statistics.median(values) for name, values in result["milliseconds"]["clock"].items()}
    assert set(VIEWS) < set(medians)
    assert medians.pop("first paint") < 1000
    opening = ("the verdict painted", "charts drawn")
    assert {name: ms for name, ms in medians.items() if ms >= 500 and name not in opening} == {}
