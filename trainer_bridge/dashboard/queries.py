"""The views over a run's cells: sums of what the parts have summed already."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from trainer_bridge.store.cells import Cells, heat, join, sums_by_bin, totals
from trainer_bridge.store.merge import plain
from trainer_bridge.store.partials import EQUAL_BIN, PROBABILITY_CELLS
from trainer_bridge.store.reader import RunStore

KEPT = 64
"""Views that are remembered until their run changes."""
MAX_ROWS = 80
"""Rows of a heat map; runs with more steps show several steps in one row."""
GROUPED = ("length", "replica", "version", "filter")


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps first..last, inclusive; None: open."""

    first: int | None = None
    last: int | None = None


class Queries:
    """Views of the runs of one store. Thread-safe."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, str, StepRange], tuple[int, dict[str, Any]]] = OrderedDict()

    def distribution(self, run: str, steps: StepRange) -> dict[str, Any]:
        """Histograms of |D| and of ULP, and the probabilities' density. Errors: NotFound.

        ``delta``: [bin, tokens] with ``equal`` apart; ``ulp``: [k, tokens]; ``probability``: [x, y, tokens, unequal].
        """
        return self._remembered("distribution", run, steps, lambda: self._distribution(run, steps))

    def where(self, run: str, steps: StepRange) -> dict[str, Any]:
        """Where differences lie: position by step, and by length, replica, weight version and filter. Errors: NotFound.

        ``heat``: [first step of the row, position, tokens, unequal, max |D|]; ``steps_per_row`` steps share a row.
        Groups: [key or bin, tokens, unequal, max |D|, sum |D|, sum k3].
        """
        return self._remembered("where", run, steps, lambda: self._where(run, steps))

    def _distribution(self, run: str, steps: StepRange) -> dict[str, Any]:
        delta, ulp, density = (
            list(zip(*(column.tolist() for column in sums_by_bin(self._cells(run, name, steps))), strict=True))
            for name in ("delta", "ulp", "probability")
        )
        return {
            "equal": next((tokens for place, tokens, _ in delta if place == EQUAL_BIN), 0),
            "delta": [[place, tokens] for place, tokens, _ in delta if place != EQUAL_BIN],
            "ulp": [[place, tokens] for place, tokens, _ in ulp],
            "cells": PROBABILITY_CELLS,
            "probability": [[*divmod(place, PROBABILITY_CELLS), *counts] for place, *counts in density],
        }

    def _where(self, run: str, steps: StepRange) -> dict[str, Any]:
        parts = self._store.cells(run, "position", steps.first, steps.last)
        chosen = [step for step, _ in parts]
        start = min(chosen, default=0)
        width = math.ceil((max(chosen, default=0) - start + 1) / MAX_ROWS)
        rows = heat([(start + (step - start) // width * width, cells) for step, cells in parts])
        return {
            "steps_per_row": width,
            "heat": [[*row[:4], plain(row[4])] for row in rows],
            "groups": {name: self._group(run, name, steps) for name in GROUPED},
        }

    def _group(self, run: str, dimension: str, steps: StepRange) -> list[list[Any]]:
        cells = self._cells(run, dimension, steps)
        found = totals(cells, cells.key or cells.bin.tolist())
        return [
            [name, t.tokens, t.unequal, plain(t.max_abs), plain(t.sum_abs), plain(t.sum_k3)]
            for name, t in sorted(found.items(), key=lambda item: _order(item[0]))
        ]

    def _cells(self, run: str, dimension: str, steps: StepRange) -> Cells:
        return join([cells for _, cells in self._store.cells(run, dimension, steps.first, steps.last)])

    def _remembered(self, view: str, run: str, steps: StepRange, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        revision = self._store.revision(run)
        place = (view, run, steps)
        with self._lock:
            held = self._kept.get(place)
            if held is not None and held[0] == revision:
                self._kept.move_to_end(place)
                return held[1]
        made = make()
        with self._lock:
            self._kept[place] = (revision, made)
            self._kept.move_to_end(place)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made


def _order(name: str | int) -> tuple[bool, int, str]:
    """Numbers by value, before names."""
    text = str(name)
    return (not text.isdigit(), int(text) if text.isdigit() else 0, text)
