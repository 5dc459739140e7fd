"""Figures of a step from its parts.

One part: exactly what ``compare`` said. Several parts (data-parallel ranks): what ``compare`` over all their samples
would say, bit for bit, but for ``probs_diff_std`` and ``pearson``, which come from exact sums instead of two passes and
may differ in their last digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer_bridge.metrics import exact_mean
from trainer_bridge.store.exact import rounded

Row = Mapping[str, Any]
"""One row of the ``steps`` table."""
UnequalValues = Callable[[], npt.NDArray[np.float64]]
"""|D| of every unequal token of the step [U]."""

_COUNTS = (
    "samples", "empty_samples", "tokens", "equal_tokens", "unequal_tokens", "digests_total", "digests_equal",
    "filtered_tokens",
)  # fmt: skip
_FIRST_KEYS = ("request_id", "sample_index", "position", "token_id")


def step_figures(parts: Sequence[Row], unequal_values: UnequalValues) -> dict[str, Any]:
    """Figures of ``report.to_json`` (without its verdict line) for the tokens of all parts, and the step's facts."""
    figures = json.loads(parts[0]["comparison"]) if len(parts) == 1 else _merged(parts, unequal_values)
    figures.pop("verdict", None)
    rewards = [value for part in parts for value in part["rewards"] or []]
    seconds = _joined(parts, "seconds")
    versions = [part["weight_version"] for part in parts if part["weight_version"] is not None]
    return figures | {
        "parts": len(parts),
        "ess": plain(parts[0]["ess"] if len(parts) == 1 else _ess(parts)),
        "weight_version": max(versions, default=None),
        "weight_digest": parts[0]["weight_digest"],
        "mean_reward": plain(exact_mean(np.array(rewards, np.float64))),
        "seconds": seconds,
        "tokens_per_s": figures["tokens"] / seconds["rollout"] if seconds.get("rollout") else None,
        "scalars": {name: plain(value) for name, value in _joined(parts, "scalars").items()},
        "findings": list(dict.fromkeys(finding for part in parts for finding in part["findings"] or [])),
        "kept_samples": sum(part["kept_samples"] for part in parts),
        "kept_tokens": sum(part["kept_tokens"] for part in parts),
        "recorded_at": max(part["recorded_at"] for part in parts).timestamp(),
    }


def plain(value: float | None) -> float | str | None:
    """A float as JSON holds it: NaN is null, infinities are text."""
    if value is None or math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def _joined(parts: Sequence[Row], column: str) -> dict[str, float]:
    """A map column over parts: the largest value, as ranks wait for the slowest and log the same scalars."""
    joined: dict[str, float] = {}
    for part in parts:
        for name, value in part[column] or []:
            joined[name] = max(value, joined.get(name, value))
    return joined


def _sums(parts: Sequence[Row]) -> dict[str, float]:
    tables = [dict(part["exact_sums"]) for part in parts]
    return {name: rounded(table[name] for table in tables) for name in tables[0]}


def _ess(parts: Sequence[Row]) -> float:
    sums = _sums(parts)
    tokens = sum(part["tokens"] for part in parts)
    return sums["weight"] ** 2 / (tokens * sums["weight_squared"]) if tokens else math.nan


def _merged(parts: Sequence[Row], unequal_values: UnequalValues) -> dict[str, Any]:
    all_figures = [json.loads(part["comparison"]) for part in parts]
    figures: dict[str, Any] = {name: sum(f[name] for f in all_figures) for name in _COUNTS}
    tokens, samples = figures["tokens"], figures["samples"]
    sums = _sums(parts)

    def mean(name: str, count: int) -> float | str | None:
        return plain(sums[name] / count) if count else None

    equal = np.zeros(figures["equal_tokens"])
    values = np.concatenate([equal, unequal_values()]) if figures["unequal_tokens"] else equal
    for name, q in (("p50_abs", 0.5), ("p90_abs", 0.9), ("p99_abs", 0.99)):
        figures[name] = plain(float(np.quantile(values, q))) if tokens else None
    for name in ("max_abs", "probs_diff_max", "max_ulp"):
        figures[name] = max((f[name] for f in all_figures if f[name] is not None), key=float, default=None)
    return figures | {
        "mean_abs": mean("abs", tokens),
        "k1": mean("negated", tokens),
        "k3": mean("k3", tokens),
        "probs_diff_mean": mean("probs_diff", tokens),
        "probs_diff_std": plain(_std(sums, tokens)),
        "pearson": plain(_pearson(sums, tokens)),
        "rollout_ppl": mean("rollout_ppl", samples),
        "trainer_ppl": mean("trainer_ppl", samples),
        "mean_log_kept_mass": mean("log_kept_mass", figures["filtered_tokens"]),
        "ulp_histogram": _histogram(all_figures),
        "first_mismatch": _first(all_figures, "first_mismatch"),
        "first_unequal_digest": _first(all_figures, "first_unequal_digest"),
        "bitwise_equal": tokens > 0
        and figures["equal_tokens"] == tokens
        and figures["digests_equal"] == figures["digests_total"],
    }


def _std(sums: Mapping[str, float], n: int) -> float:
    if n < 2:
        return math.nan
    return math.sqrt(max(0.0, (sums["probs_diff_squared"] - sums["probs_diff"] ** 2 / n) / (n - 1)))


def _pearson(sums: Mapping[str, float], n: int) -> float:
    if n < 2:
        return math.nan
    left = sums["pp"] - sums["p"] ** 2 / n
    right = sums["qq"] - sums["q"] ** 2 / n
    if left <= 0.0 or right <= 0.0:
        return math.nan
    return max(-1.0, min(1.0, (sums["pq"] - sums["p"] * sums["q"] / n) / math.sqrt(left * right)))


def _histogram(all_figures: Sequence[Row]) -> list[dict[str, int]]:
    counts: dict[tuple[int, int], int] = {}
    for figures in all_figures:
        for cell in figures["ulp_histogram"]:
            place = (cell["low"], cell["high"])
            counts[place] = counts.get(place, 0) + cell["count"]
    largest = max(counts, default=(0, 0))
    # compare lists every bin up to the largest one seen, empty ones too.
    edges = [(0, 0), *((2 ** (k - 1), 2**k - 1) for k in range(1, largest[0].bit_length() + 1))] if counts else []
    return [{"low": low, "high": high, "count": counts.get((low, high), 0)} for low, high in edges]


def _first(all_figures: Sequence[Row], name: str) -> Any:
    found = [f[name] for f in all_figures if f[name] is not None]
    return min(found, key=lambda m: tuple(m[key] for key in _FIRST_KEYS), default=None)
