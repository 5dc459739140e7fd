"""Results on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.results import Results
from benchmarks.tables import QUIET_CORES, all_grids


def print_results(results: Results) -> None:
    """Every table, then what failed."""
    console = Console(width=160)
    for grid in all_grids(results):
        table = Table(title=grid.title, title_justify="left")
        for i, column in enumerate(grid.head):
            table.add_column(column, justify="right" if i else "left")
        for row in grid.rows:
            table.add_row(*(cell.replace("**", "") for cell in row))
        console.print(table)
    console.print(
        "Beside another engine's speed: how many times as fast zerodrift was, median (lowest-highest) of paired turns. "
        f"°: others used over {QUIET_CORES} cores meanwhile."
    )
    for name, record in results.runners.items():
        if "failure" in record:
            console.print(f"{name} failed: {record['failure']}", markup=False)
