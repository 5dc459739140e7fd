"""Results as they are kept: one JSON file a model, pairs of measurements taken in turn."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.catalogue import BASELINE
from benchmarks.runner import Measurement
from benchmarks.workloads import Workload
from rollout.whole_files import write_whole

Turn = tuple[Measurement, Measurement]
"""zerodrift's and the other's measurement of the same job, taken one after the other."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated figures."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """Of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


@dataclass(slots=True)
class Pair:
    """zerodrift beside one other runner on one workload."""

    runner: str
    workload: Workload
    session: str
    """key of ``Results.sessions``"""
    turns: list[Turn] = field(default_factory=list)
    failure: str = ""
    """why there are no (more) turns"""

    @property
    def ratio(self) -> Spread:
        """zerodrift's speed over the other's, turn by turn: above 1 zerodrift is faster."""
        return spread([ours.rate / theirs.rate for ours, theirs in self.turns])

    @property
    def rate(self) -> Spread:
        """The other's generated tokens per second."""
        return spread([theirs.rate for _, theirs in self.turns])

    @property
    def peak_bytes(self) -> int:
        """The other's peak memory, its engine loaded included."""
        return max(theirs.peak_bytes for _, theirs in self.turns)

    @property
    def foreign_cpu(self) -> float:
        """Most cores that the rest of the machine used during a turn of either."""
        return max(m.other_cpu for turn in self.turns for m in turn)


@dataclass(slots=True)
class Results:
    """Everything measured of one model."""

    model: str
    kind: str = "engines"
    """"engines": beside each other at the standard workloads; "curves": along growing ones"""
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """machine, date, versions, commit of each run of the benchmark that has figures here"""
    runners: dict[str, dict[str, Any]] = field(default_factory=dict)
    """by runner: title, versions and settings, environment variables, or why it failed"""
    pairs: dict[str, Pair] = field(default_factory=dict)
    """by "runner/workload" """

    def workloads(self) -> list[Workload]:
        """Each once, in the order of measuring."""
        return list({pair.workload.name: pair.workload for pair in self.pairs.values()}.values())

    def pair(self, runner: str, workload: str) -> Pair | None:
        """What there is of a runner on a workload."""
        return self.pairs.get(f"{runner}/{workload}")

    def ours(self, workload: str, figure: Callable[[Measurement], float]) -> Spread | None:
        """zerodrift's figure over every turn of the workload, whoever was beside it."""
        values = [
            figure(ours) for pair in self.pairs.values() if pair.workload.name == workload for ours, _ in pair.turns
        ]
        return spread(values) if values else None

    def pairs_of(self, runner: str) -> list[Pair]:
        """What was measured of a runner."""
        return [pair for pair in self.pairs.values() if pair.runner == runner and pair.turns]

    def figure(self, runner: str, workload: str, figure: Callable[[Measurement], float]) -> Spread | None:
        """A runner's figure at a workload, zerodrift's or another's; None when not measured."""
        if runner == BASELINE:
            return self.ours(workload, figure)
        pair = self.pair(runner, workload)
        return spread([figure(theirs) for _, theirs in pair.turns]) if pair is not None and pair.turns else None

    def save(self, path: Path) -> None:
        """Replace the file as a whole, so that an interrupted run leaves the last state."""
        used = {pair.session for pair in self.pairs.values()}
        self.sessions = {key: value for key, value in self.sessions.items() if key in used}
        text = json.dumps(asdict(self), indent=1) + "\n"
        write_whole(path, lambda file: file.write(text.encode()), parents=True)


def load_results(path: Path) -> Results:
    """What ``Results.save`` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    pairs = {key: _pair(value) for key, value in data.pop("pairs").items()}
    return Results(**data, pairs=pairs)


def _pair(data: dict[str, Any]) -> Pair:
    turns = [(Measurement(**ours), Measurement(**theirs)) for ours, theirs in data.pop("turns")]
    return Pair(**(data | {"workload": Workload(**data["workload"])}), turns=turns)
