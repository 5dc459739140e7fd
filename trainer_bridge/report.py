"""Show a comparison: one plain line, a table, or every figure as JSON. Works without a terminal."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer_bridge.records import Comparison
from trainer_bridge.ulp import UlpBin


def verdict(comparison: Comparison) -> str:
    """One plain line: "bitwise equal: ...", "UNEQUAL: ... first at ..." or "no data: ..."."""
    c = comparison
    if not c.has_data:
        return f"no data: {c.empty_samples} samples, none with a token to compare"
    digests = f", {c.digests_equal:,} / {c.digests_total:,} row digests" if c.digests_total else ""
    if c.bitwise_equal:
        return f"bitwise equal: {c.tokens:,} / {c.tokens:,} tokens{digests}"
    if c.first_mismatch is None:
        return f"UNEQUAL: 0 of {c.tokens:,} tokens{digests}; first {_first_digest(c)}"
    m = c.first_mismatch
    return (
        f"UNEQUAL: {c.unequal_tokens:,} of {c.tokens:,} tokens{digests}; first at request {m.request_id!r} sample "
        f"{m.sample_index} token {m.position} (absolute {m.absolute_position}, id {m.token_id}): rollout "
        f"{m.rollout_logprob!r} ({m.rollout_bits}), trainer {m.trainer_logprob!r} ({m.trainer_bits}), {m.ulp:,} ULP"
        f"{_origin(m.weight_version, m.replica)}"
    )


def table(comparison: Comparison) -> Table:
    """Two columns, one figure a row."""
    c = comparison
    result = Table(title="rollout against trainer", title_justify="left")
    result.add_column("figure")
    result.add_column("value", justify="right")
    rows = [
        ("samples (empty left out)", f"{c.samples:,} ({c.empty_samples:,})"),
        ("tokens", f"{c.tokens:,}"),
        ("equal bits", f"{c.equal_tokens:,}"),
        ("max |Δ| nat", _number(c.max_abs)),
        ("mean |Δ| nat", _number(c.mean_abs)),
        ("|Δ| p50 / p90 / p99 nat", " / ".join(map(_number, (c.p50_abs, c.p90_abs, c.p99_abs)))),
        ("k1 KL nat", _number(c.k1)),
        ("k3 KL nat", _number(c.k3)),
        ("|Δ probability| max / mean", f"{_number(c.probs_diff_max)} / {_number(c.probs_diff_mean)}"),
        ("|Δ probability| std", _number(c.probs_diff_std)),
        ("Pearson of probabilities", _number(c.pearson)),
        ("perplexity rollout / trainer", f"{_number(c.rollout_ppl)} / {_number(c.trainer_ppl)}"),
        ("row digests equal", f"{c.digests_equal:,} / {c.digests_total:,}" if c.digests_total else "not asked for"),
        ("mean log kept mass nat (filter)", _number(c.mean_log_kept_mass) if c.filtered_tokens else "no filter"),
    ]
    rows += [(f"ULP {_bin_name(b)}", f"{b.count:,}") for b in c.ulp_histogram if b.count or b.high == 0]
    for name, value in rows:
        result.add_row(Text(name), Text(value))
    return result


def print_verdict(evidence: Table, verdict: str, *, good: bool, console: Console | None) -> None:
    """A table, then one unwrapped line, green or red."""
    target = console if console is not None else Console()
    target.print(evidence)
    # Text, not markup: a request id may hold square brackets.
    target.print(Text(verdict, style="green" if good else "bold red"), soft_wrap=True)


def render(comparison: Comparison, console: Console | None = None) -> None:
    """Print the table, then the verdict as one unwrapped line."""
    print_verdict(table(comparison), verdict(comparison), good=comparison.bitwise_equal, console=console)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Every figure, ready for ``json.dumps(..., allow_nan=False)``: NaN is null, infinities are "inf" and "-inf"."""
    figures = asdict(comparison)
    figures["unequal_tokens"] = comparison.unequal_tokens
    figures["bitwise_equal"] = comparison.bitwise_equal
    figures["verdict"] = verdict(comparison)
    result: dict[str, Any] = plain(figures)
    return result


def plain(value: Any) -> Any:
    """A value of dictionaries and lists for JSON: NaN is null, infinities are "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _number(value: float) -> str:
    if math.isnan(value):
        return "no data"
    return "0" if value == 0.0 else f"{value:.6g}"


def _bin_name(ulps: UlpBin) -> str:
    if ulps.high == 0:
        return "0 (equal bits)"
    return f"{ulps.low:,}" if ulps.low == ulps.high else f"{ulps.low:,}-{ulps.high:,}"


def _origin(weight_version: int | None, replica: str | None) -> str:
    parts = []
    if weight_version is not None:
        parts.append(f"weights v{weight_version}")
    if replica is not None:
        parts.append(f"replica {replica}")
    return f" [{', '.join(parts)}]" if parts else ""


def _first_digest(comparison: Comparison) -> str:
    d = comparison.first_unequal_digest
    if d is None:
        return "unequal row digest not recorded"
    return (
        f"unequal row digest at request {d.request_id!r} sample {d.sample_index} token {d.position} (absolute "
        f"{d.absolute_position}, id {d.token_id}): rollout {d.rollout_digest}, trainer {d.trainer_digest}"
        f"{_origin(d.weight_version, d.replica)}"
    )
