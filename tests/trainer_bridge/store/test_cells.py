"""Sums of cells against sums made one by one, and against DuckDB over the files themselves."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_bridge.store.runs import record_run
from trainer_bridge.dashboard.queries import Queries, StepRange
from trainer_bridge.store.cells import cells_of, heat, join, sums_by_bin, totals
from trainer_bridge.store.partials import EQUAL_BIN
from trainer_bridge.store.reader import RunStore
from trainer_bridge.store.schema import GROUP

FIELDS = ("dimension", "key", "bin", "tokens", "unequal", "max_abs", "sum_abs", "sum_k3")
CELL = st.tuples(st.integers(-1000, 7000), st.integers(1, 9), st.integers(0, 1), st.sampled_from([0.0, 0.5, math.inf]))


def table(rows: list[tuple[str, str, int, int, int, float]]) -> pa.Table:
    made = [dict(zip(FIELDS, (*row, row[-1], row[-1]), strict=True)) for row in rows]
    return pa.Table.from_pylist(made, schema=pa.schema(list(GROUP)))


@given(st.lists(st.lists(CELL, max_size=6), max_size=5))
def test_bins_and_heat_are_summed_over_parts(parts: list[list[tuple[int, int, int, float]]]) -> None:
    cells = [cells_of(table([("x", "", *cell) for cell in part])).get("x") for part in parts]
    there = [c for c in cells if c is not None]
    expected: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    hot: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for row, part in enumerate([p for p in parts if p]):
        for place, tokens, unequal, largest in part:
            expected[place][0] += tokens
            expected[place][1] += unequal
            cell = hot[row, place]
            hot[row, place] = [cell[0] + tokens, cell[1] + unequal, max(cell[2], largest)]
    bins, tokens, unequal = sums_by_bin(join(there))
    found = list(zip(bins.tolist(), zip(tokens.tolist(), unequal.tolist(), strict=True), strict=True))
    assert found == [(place, tuple(expected[place])) for place in sorted(expected)]
    assert heat(list(enumerate(there))) == [[*place, *hot[place]] for place in sorted(hot)]


def test_names_are_summed_and_dimensions_kept_apart() -> None:
    rows = [("replica", "a", 0, 3, 1, 0.5), ("replica", "b", 0, 2, 0, 0.0), ("length", "", 8, 5, 1, 0.5)]
    one = cells_of(table(rows))
    both = join([one["replica"], one["replica"]])
    found = totals(both, both.key)
    assert list(found) == ["a", "b"] and (found["a"].tokens, found["a"].unequal, found["a"].max_abs) == (6, 2, 0.5)
    assert one["length"].key == () and one["length"].bin.tolist() == [8]


def test_views_are_what_duckdb_says_of_the_files(tmp_path: Path) -> None:
    record_run(tmp_path, steps=4, broken_from=2)
    store = RunStore(tmp_path)
    store.refresh()
    files = f"read_parquet('{tmp_path}/run=*/steps/*/*.parquet', hive_partitioning=true)"
    sql = f"SELECT step, g.* FROM (SELECT step, unnest(groups) AS g FROM {files})"
    connection = duckdb.connect()
    for steps, where in ((StepRange(), "true"), (StepRange(1, 2), "step BETWEEN 1 AND 2")):
        found = Queries(store).distribution("run", steps)
        rows = connection.execute(
            f"SELECT bin, sum(tokens) FROM ({sql}) WHERE dimension = 'delta' AND {where} GROUP BY bin ORDER BY bin"
        ).fetchall()
        assert [[EQUAL_BIN, found["equal"]], *found["delta"]] == [list(row) for row in rows]
        shown = Queries(store).where("run", steps)
        rows = connection.execute(
            f"SELECT step, bin, sum(tokens), sum(unequal), max(max_abs) FROM ({sql}) WHERE dimension = 'position' "
            f"AND {where} GROUP BY step, bin ORDER BY step, bin"
        ).fetchall()
        assert shown["heat"] == [list(row) for row in rows] and len(rows) > 5
        rows = connection.execute(
            f"SELECT key, sum(tokens), sum(unequal), max(max_abs), sum(sum_abs), sum(sum_k3) FROM ({sql}) "
            f"WHERE dimension = 'replica' AND {where} GROUP BY key ORDER BY key"
        ).fetchall()
        assert [r[:4] for r in shown["groups"]["replica"]] == [list(row[:4]) for row in rows]
        assert np.allclose([r[4:] for r in shown["groups"]["replica"]], [row[4:] for row in rows], rtol=1e-12)


def test_a_view_is_remembered_until_its_run_changes(tmp_path: Path) -> None:
    record_run(tmp_path, steps=1)
    store = RunStore(tmp_path)
    store.refresh()
    queries = Queries(store)
    first = queries.where("run", StepRange())
    assert queries.where("run", StepRange()) is first
    record_run(tmp_path, steps=2)
    store.refresh()
    assert queries.where("run", StepRange())["heat"] != first["heat"]
