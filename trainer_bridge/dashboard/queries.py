"""The views over a run's cells: small SQL over what the parts have summed already."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import duckdb

from trainer_bridge.store.partials import EQUAL_BIN, PROBABILITY_CELLS
from trainer_bridge.store.reader import RunStore

MAX_ROWS = 80
"""Rows of a heat map; runs with more steps show several steps in one row."""
GROUPED = ("length", "replica", "version", "filter")


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps first..last, inclusive; None: open."""

    first: int | None = None
    last: int | None = None

    def where(self) -> str:
        """SQL condition; integers only, so nothing can be injected."""
        parts = [] if self.first is None else [f"step >= {int(self.first)}"]
        parts += [] if self.last is None else [f"step <= {int(self.last)}"]
        return " AND ".join(parts) or "true"


class Queries:
    """Views of the runs of one store. Thread-safe."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._connections: dict[str, tuple[int, duckdb.DuckDBPyConnection]] = {}

    def distribution(self, run: str, steps: StepRange) -> dict[str, Any]:
        """Histograms of |D| and of ULP, and the probabilities' density.

        ``delta``: [bin, tokens] with ``equal`` apart; ``ulp``: [k, tokens]; ``probability``: [x, y, tokens, unequal].
        """
        delta = self._rows(run, steps, "bin, sum(tokens)", "delta", "bin")
        ulp = self._rows(run, steps, "bin, sum(tokens)", "ulp", "bin")
        density = self._rows(run, steps, "bin, sum(tokens), sum(unequal)", "probability", "bin")
        return {
            "equal": next((count for place, count in delta if place == EQUAL_BIN), 0),
            "delta": [row for row in delta if row[0] != EQUAL_BIN],
            "ulp": ulp,
            "cells": PROBABILITY_CELLS,
            "probability": [[*divmod(place, PROBABILITY_CELLS), *counts] for place, *counts in density],
        }

    def where(self, run: str, steps: StepRange) -> dict[str, Any]:
        """Where differences lie: position by step, and by length, replica, weight version and filter.

        ``heat``: [first step of the row, position, tokens, unequal, max |D|]; ``steps_per_row`` steps share a row.
        Groups: [key or bin, tokens, unequal, max |D|, sum |D|, sum k3].
        """
        chosen = [
            s for s in self._store.figures(run)
            if (steps.first is None or s >= steps.first) and (steps.last is None or s <= steps.last)
        ]  # fmt: skip
        span = chosen[-1] - chosen[0] + 1 if chosen else 1
        width = math.ceil(span / MAX_ROWS)
        start = chosen[0] if chosen else 0
        row = f"{start} + ((step - {start}) // {width}) * {width}"
        measures = "sum(tokens), sum(unequal), max(max_abs)"
        groups = {
            name: self._rows(
                run, steps, f"{'bin' if name == 'length' else 'key'}, {measures}, sum(sum_abs), sum(sum_k3)", name,
                "bin" if name == "length" else "key",
            )
            for name in GROUPED
        }  # fmt: skip
        groups["version"].sort(key=lambda r: (not str(r[0]).isdigit(), int(r[0]) if str(r[0]).isdigit() else 0))
        return {
            "steps_per_row": width,
            "heat": self._rows(run, steps, f"{row} AS row, bin, {measures}", "position", "row, bin"),
            "groups": groups,
        }

    def _rows(self, run: str, steps: StepRange, columns: str, dimension: str, by: str) -> list[list[Any]]:
        cursor = self._connection(run).cursor()
        found = cursor.execute(
            f"SELECT {columns} FROM cells WHERE dimension = ? AND {steps.where()} GROUP BY {by} ORDER BY {by}",
            [dimension],
        ).fetchall()
        # DuckDB sums bigints as hugeints, which come back as int already; floats stay floats.
        return [list(row) for row in found]

    def _connection(self, run: str) -> duckdb.DuckDBPyConnection:
        revision = self._store.revision(run)
        with self._lock:
            held = self._connections.get(run)
            if held is None or held[0] != revision:
                connection = duckdb.connect(config={"threads": 1})
                connection.register("arrow_cells", self._store.groups(run))
                connection.execute("CREATE TABLE cells AS SELECT * FROM arrow_cells")
                connection.unregister("arrow_cells")
                held = self._connections[run] = (revision, connection)
            return held[1]
