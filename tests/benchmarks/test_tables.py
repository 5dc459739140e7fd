"""Tables and charts say what the results hold."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.charts import curves_chart, engines_chart
from benchmarks.curves import CURVES
from benchmarks.results import Pair, Results
from benchmarks.tables import all_grids, cost_grid, curve_grid, speed_grid
from tests.benchmarks.fakes import SESSION, measurement, pair, results

ENGINES = results(
    pair("vllm", "n8", [120.0, 110.0, 150.0], [100.0, 100.0, 100.0], gib=3.0),
    pair("hf", "n8", [400.0], [100.0], others=0.5),
    pair("inexact", "n8", [97.0], [100.0]),
    pair("service", "n8", [100.0], [96.0]),
    pair("floor", "n8", [80.0], [100.0]),
)


def curves() -> Results:
    found = Results("110m", "curves", {"s": SESSION}, {"vllm": {"title": "vLLM"}, "floor": {"title": "floor"}})
    for curve in CURVES.values():
        for i, work in enumerate(curve.workloads):
            for runner, rate in (("vllm", 90.0), ("floor", 130.0)):
                turn = (measurement(100.0 + i, work), measurement(rate, work, gib=2.0))
                found.pairs[f"{runner}/{work.name}"] = Pair(runner, work, "s", [turn])
    return found


def test_speeds_and_ratios() -> None:
    grid = speed_grid(ENGINES)
    rows = {row[0]: row for row in grid.rows}
    # The median over all turns of zerodrift: 80, 97, 100, 110, 120, 150, 400.
    assert rows["**zerodrift**"][1:] == ("**110**", "1.0")
    assert rows["Vllm"][1:] == ("100, 1.20x (1.10-1.50)", "3.0")
    # Taken while others were busy.
    assert rows["Hf"][1] == "100°, 4.00x (4.00-4.00)"
    assert "| generated tokens/s | N = 8 | peak GiB |" in grid.markdown()


def test_costs_are_shares_of_the_right_side() -> None:
    cells = [row[1] for row in cost_grid(ENGINES).rows]
    assert cells == ["97 % (97-97)", "96 % (96-96)", "80 % (80-80)"]


def test_a_failure_is_no_figure() -> None:
    failed = results(pair("vllm", "n8", [], []), pair("hf", "n8", [2.0], [1.0]))
    assert [row[1] for row in speed_grid(failed).rows][1:] == ["failed", "1.00, 2.00x (2.00-2.00)"]


def test_curves_have_a_row_a_point() -> None:
    curve = CURVES["sequences"]
    grid = curve_grid(curves(), curve)
    assert [row[0] for row in grid.rows] == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert grid.rows[2][1:] == ("102", "130", "90.0", "1.0", "2.0")
    assert len(all_grids(curves())) == len(CURVES)


def test_charts_are_svg_with_every_value() -> None:
    drawn = engines_chart([ENGINES])
    ElementTree.fromstring(drawn)
    assert drawn == engines_chart([ENGINES])
    for text in (">110<", ">100<", ">vLLM<", ">HF generate<", "N = 8"):
        assert text in drawn
    plotted = curves_chart(curves())
    ElementTree.fromstring(plotted)
    assert plotted.count("<circle") == sum(len(c.workloads) for c in CURVES.values()) * 5
