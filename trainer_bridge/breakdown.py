"""Everything that one number hides: slices, worst tokens, shifts, ratios and verl's own figures of one batch.

``compare`` says whether two sides are equal; this says where they are not, and how verl would have reported it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from trainer_bridge.align_probe import AlignmentProbe, probe_alignment
from trainer_bridge.metrics import verl_metrics
from trainer_bridge.ratio_summary import RatioSummary, summarise_ratios
from trainer_bridge.records import ScoredSample
from trainer_bridge.report import plain
from trainer_bridge.slices import (
    Slice,
    WorstToken,
    by_filter,
    by_length,
    by_position,
    by_replica,
    by_version,
    worst_tokens,
)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Figures of one batch beside ``Comparison``; only tokens with mask 1 enter any of them."""

    slices: dict[str, tuple[Slice, ...]]
    """"position", "length", "replica", "version" and "filter"; each holds every token once"""
    worst: tuple[WorstToken, ...]
    """unequal tokens, largest difference first"""
    probe: AlignmentProbe
    """differences at shift -1, 0 and +1"""
    ratios: RatioSummary
    """trainer / rollout per token, per sample and as geometric mean"""
    verl: dict[str, float]
    """what verl logs for this batch: ``training/*`` and ``rollout_corr/*``"""


def break_down(samples: Sequence[ScoredSample], *, width: int = 64, worst: int = 10) -> Breakdown:
    """Slice a batch.

    Args:
        samples: both sides' log-probs.
        width: tokens in a bin of positions.
        worst: how many tokens to name.

    Errors: InvalidRequest for a width below 1.
    """
    return Breakdown(
        slices={
            "position": tuple(by_position(samples, width)),
            "length": tuple(by_length(samples)),
            "replica": tuple(by_replica(samples)),
            "version": tuple(by_version(samples)),
            "filter": tuple(by_filter(samples)),
        },
        worst=tuple(worst_tokens(samples, worst)),
        probe=probe_alignment(samples),
        ratios=summarise_ratios(samples),
        verl=verl_metrics(samples),
    )


def breakdown_tables(breakdown: Breakdown) -> list[Table]:
    """Slices and worst tokens as tables; a slicing of one slice says nothing new and is left out."""
    places = Table(title="where", title_justify="left")
    for name, justify in (("by", "left"), ("slice", "left"), ("tokens", "right"), ("equal bits", "right")):
        places.add_column(name, justify=justify)  # type: ignore[arg-type]
    places.add_column("max |Δ| nat", justify="right")
    places.add_column("max ULP", justify="right")
    for by, slices in breakdown.slices.items():
        for s in slices if len(slices) > 1 else ():
            figures = (s.key, f"{s.tokens:,}", f"{s.equal_tokens:,}", f"{s.max_abs:.6g}", f"{s.max_ulp:,}")
            places.add_row(Text(by), *map(Text, figures))
    tokens = Table(title="worst tokens", title_justify="left")
    for name in ("request", "sample", "token", "id", "rollout", "trainer", "ULP", "replica", "version"):
        tokens.add_column(name)
    for w in breakdown.worst:
        where = (w.request_id, w.sample_index, w.position, w.token_id)
        values = (repr(w.rollout_logprob), repr(w.trainer_logprob), f"{w.ulp:,}", w.replica, w.weight_version)
        tokens.add_row(*(Text("-" if value is None else str(value)) for value in (*where, *values)))
    return [table for table in (places, tokens) if table.row_count]


def breakdown_json(breakdown: Breakdown) -> dict[str, Any]:
    """Every figure, ready for ``json.dumps(..., allow_nan=False)``: NaN is null, infinities are "inf" and "-inf"."""
    figures: dict[str, Any] = plain(asdict(breakdown))
    figures["probe"] |= {"alarm": breakdown.probe.alarm, "best_shift": breakdown.probe.best_shift}
    return figures
