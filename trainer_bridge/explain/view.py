"""An explanation as a sentence, a table and JSON."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer_bridge.explain.findings import Cause, Explanation
from trainer_bridge.report import print_verdict

_MARKS = {True: "equal", False: "DIFFERS", None: "-"}
_EVERYWHERE = frozenset({"every token", "all tensors", "every operation"})
_LEAD = {
    Cause.NONE: "no difference",
    Cause.WEIGHTS: "the weights differ",
    Cause.INPUTS: "the inputs differ",
    Cause.SEMANTICS: "the log-probs mean different things",
    Cause.NUMERICS: "the arithmetic differs",
    Cause.UNKNOWN: "not explained",
}


def verdict(explanation: Explanation) -> str:
    """One sentence."""
    finding = explanation.finding
    told = finding.place in _EVERYWHERE or all(part in finding.sentence for part in finding.place.split(", "))
    place = "" if told else f", at {finding.place}"
    return f"{_LEAD[finding.cause]}: {finding.sentence}{place}."


def table(explanation: Explanation) -> Table:
    """One row a question, in the order they were asked."""
    result = Table(title="evidence", title_justify="left")
    for column in ("stage", "question", "", "answer"):
        result.add_column(column)
    for row in explanation.evidence:
        style = {True: "green", False: "bold red", None: ""}[row.clean]
        result.add_row(row.stage, row.question, Text(_MARKS[row.clean], style=style), Text(row.answer))
    return result


def render(explanation: Explanation, console: Console | None = None) -> None:
    """Print the table, then the verdict on one line."""
    print_verdict(table(explanation), verdict(explanation), good=explanation.clean, console=console)


def to_json(explanation: Explanation) -> dict[str, Any]:
    """Everything, ready for ``json.dumps(..., allow_nan=False)``."""
    finding = explanation.finding
    return {
        "verdict": verdict(explanation),
        "cause": finding.cause.value,
        "kind": finding.kind,
        "place": finding.place,
        "details": {k: _plain(v) for k, v in finding.details.items()},
        "also": [{"cause": f.cause.value, "kind": f.kind, "place": f.place, "sentence": f.sentence}
                 for f in explanation.also],
        "evidence": [{"stage": e.stage, "question": e.question, "answer": e.answer, "clean": e.clean}
                     for e in explanation.evidence],
        "cpu_s": round(explanation.cpu_s, 3),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
