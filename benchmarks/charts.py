"""Charts of results: engines beside each other, and growth curves. Pure: results in, SVG out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.catalogue import BASELINE
from benchmarks.curves import CURVES, Curve
from benchmarks.models import TITLES
from benchmarks.results import Results
from benchmarks.runner import Measurement
from benchmarks.svg import Drawing
from benchmarks.tables import ENGINES, HEADS, LABELS, number
from benchmarks.workloads import Workload

COLOURS = {BASELINE: "s0", "vllm": "s1", "sglang": "s2", "hf": "s3", "floor": "s4"}
_LABEL_WIDTH, _PANEL_WIDTH, _GAP, _BAR, _HEAD, _MARGIN = 92, 190, 18, 20, 20, 20
_PLOT_WIDTH, _PLOT_HEIGHT = 380, 200


def engines_chart(models: Sequence[Results]) -> str:
    """A row a model, a panel a workload, a bar an engine; every panel has its own scale."""
    works = list({w.name: w for results in models for w in results.workloads()}.values())
    rows = [(results, _engines(results)) for results in models]
    width = _MARGIN * 2 + _LABEL_WIDTH + len(works) * (_PANEL_WIDTH + _GAP) - _GAP
    heights = [_HEAD + 28 + _BAR * len(names) for _, names in rows]
    drawing = Drawing(width, 52 + sum(heights), "Generated tokens per second, zerodrift beside other engines")
    drawing.text(_MARGIN, 28, "Generated tokens per second (longer is faster), log-probs on, CPU, bfloat16", "title")
    top = 44.0
    for (results, names), height in zip(rows, heights, strict=True):
        drawing.text(_MARGIN, top + 14, TITLES[results.model], "panel")
        top += _HEAD
        for i, work in enumerate(works):
            left = _MARGIN + _LABEL_WIDTH + i * (_PANEL_WIDTH + _GAP)
            _bars(drawing, results, work, names, left, top)
        for k, name in enumerate(names):
            drawing.text(_MARGIN + _LABEL_WIDTH - 8, top + 35 + k * _BAR, LABELS[name], anchor="end")
        top += height - _HEAD
    return drawing.render()


def _engines(results: Results) -> list[str]:
    return [BASELINE, *(name for name in ENGINES if results.pairs_of(name))]


def _bars(drawing: Drawing, results: Results, work: Workload, names: list[str], left: float, top: float) -> None:
    rates = {name: rate_of(results, name, work) for name in names}
    longest = max((rate for rate in rates.values() if rate), default=1.0)
    drawing.text(left, top + 14, HEADS.get(work.name, work.name), "small")
    drawing.line([(left, top + 20), (left, top + 24 + _BAR * len(names))], "rule")
    for k, name in enumerate(names):
        y, rate = top + 24 + k * _BAR, rates[name]
        if rate is None:
            drawing.text(left + 6, y + 12, "-", "small")
            continue
        length = rate / longest * (_PANEL_WIDTH - 48)
        drawing.rect(left, y, length, _BAR - 6, f"fill {COLOURS[name]}", radius=2)
        drawing.text(left + length + 5, y + 11, number(rate), "value small")


def rate_of(results: Results, runner: str, work: Workload) -> float | None:
    """Median tokens per second; None when not measured."""
    found = results.figure(runner, work.name, lambda m: m.rate)
    return found.median if found else None


@dataclass(frozen=True, slots=True)
class _Axis:
    """A scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        """Pixels."""
        scale: Callable[[float], float] = math.log if self.log else float
        part = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.start + part * (self.end - self.start)


def curves_chart(results: Results) -> str:
    """A row a curve: speed to the left, peak memory to the right."""
    curves = [c for c in CURVES.values() if any(rate_of(results, BASELINE, w) for w in c.workloads)]
    cell_width, cell_height = _PLOT_WIDTH + 70, _PLOT_HEIGHT + 78
    drawing = Drawing(
        _MARGIN * 2 + 2 * cell_width, 52 + cell_height * len(curves), "Growth curves of zerodrift and vLLM"
    )
    drawing.text(_MARGIN, 28, f"{TITLES[results.model]}: tokens per second and peak memory, CPU, bfloat16", "title")
    for row, curve in enumerate(curves):
        for column, (what, names, figure) in enumerate(
            (
                ("generated tokens/s", (BASELINE, "vllm", "floor"), lambda m: m.rate),
                ("peak memory, GiB", (BASELINE, "vllm"), lambda m: m.peak_bytes / 2**30),
            )
        ):
            left, top = _MARGIN + column * cell_width + 44, 52 + row * cell_height
            _plot(drawing, f"{what} · {curve.title}", curve, _series(results, curve, names, figure), left, top)
    return drawing.render()


_Series = dict[str, list[tuple[float, float]]]


def _series(results: Results, curve: Curve, names: Sequence[str], figure: Callable[[Measurement], float]) -> _Series:
    found: _Series = {}
    for name in names:
        points = []
        for work, value in zip(curve.workloads, curve.values, strict=True):
            spread = results.figure(name, work.name, figure)
            if spread is not None:
                points.append((value, spread.median))
        if points:
            found[name] = points
    return found


def _plot(drawing: Drawing, title: str, curve: Curve, series: _Series, left: float, top: float) -> None:
    bottom, right = top + 24 + _PLOT_HEIGHT, left + _PLOT_WIDTH
    values = [y for points in series.values() for _, y in points]
    x = _Axis(curve.values[0], curve.values[-1], left + 8, right - 8, curve.log)
    ticks = _ticks(max(values))
    y = _Axis(0.0, ticks[-1], bottom, top + 24, False)
    drawing.text(left - 36, top + 10, title, "panel")
    for tick in ticks:
        drawing.line([(left, y.at(tick)), (right, y.at(tick))], "grid" if tick else "rule")
        drawing.text(left - 6, y.at(tick) + 4, f"{tick:,g}", "small", "end")
    for value in curve.values:
        drawing.text(x.at(value), bottom + 16, f"{value:g}", "small", "middle")
    drawing.text((left + right) / 2, bottom + 32, curve.axis, "small", "middle")
    legend = left + 12
    for name, points in series.items():
        drawing.line([(x.at(a), y.at(b)) for a, b in points], f"line {COLOURS[name]}")
        for a, b in points:
            drawing.dot(x.at(a), y.at(b), f"dot {COLOURS[name]}")
        drawing.rect(legend, top + 28, 10, 10, f"fill {COLOURS[name]}", radius=2)
        drawing.text(legend + 15, top + 37, LABELS[name], "small")
        legend += 30 + 7 * len(LABELS[name])


def _ticks(highest: float) -> list[float]:
    """Zero and round steps to above the highest value, with room for a legend."""
    rough = highest * 1.18 / 4
    scale = 10 ** math.floor(math.log10(rough))
    step = next(s * scale for s in (1, 2, 2.5, 5, 10) if s * scale >= rough)
    return [i * step for i in range(math.ceil(highest * 1.18 / step) + 1)]
