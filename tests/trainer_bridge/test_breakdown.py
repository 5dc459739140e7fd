"""Everything that one number hides, in one call: complete, poisoned where masked, and ready for JSON."""

from __future__ import annotations

import json

import numpy as np
from rich.console import Console

from rollout.types import VersionSpan
from tests.trainer_bridge.samples import f32, sample
from trainer_bridge.breakdown import break_down, breakdown_json, breakdown_tables
from trainer_bridge.compare import compare
from trainer_bridge.records import ScoredSample


def batch(poison: float = float("nan")) -> list[ScoredSample]:
    """Two samples of two replicas and three versions; one token off in each; a masked token with ``poison``."""
    long, short = f32(np.linspace(-1, -2, 10)), f32([-0.5, -0.25, poison])
    off = long.copy()
    off[7] += np.float32(0.5)
    return [
        sample(long, off, request_id="a", replica="r0", spans=(VersionSpan(3, 0, 5), VersionSpan(4, 5, 10))),
        sample(short, short + f32([-0.125, 0, 0]), [1, 1, 0], request_id="b[/]", replica="r1", filtered=True),
    ]


def test_every_part_counts_the_same_tokens() -> None:
    samples = batch()
    whole, parts = compare(samples), break_down(samples, width=4)
    assert sorted(parts.slices) == ["filter", "length", "position", "replica", "version"]
    for slices in parts.slices.values():
        assert sum(s.tokens for s in slices) == whole.tokens == 12
        assert sum(s.equal_tokens for s in slices) == whole.equal_tokens == 10
    assert [(w.request_id, w.position) for w in parts.worst] == [("a", 7), ("b[/]", 0)]
    assert parts.ratios.tokens == 12 and parts.probe.has_data
    assert parts.verl["training/rollout_probs_diff_max"] > 0


def test_j5_what_is_masked_changes_no_figure() -> None:
    assert repr(break_down(batch())) == repr(break_down(batch(float("inf")))) == repr(break_down(batch(0.0)))


def test_an_exact_batch_names_no_token_and_no_data_is_no_zero() -> None:
    exact = break_down([sample([-1.0, -2.0])])
    assert exact.worst == () and exact.verl["rollout_corr/kl"] == 0.0
    assert breakdown_tables(exact) == [], "slices of one batch alone say nothing"
    assert breakdown_json(break_down([]))["ratios"]["token_mean"] is None


def test_tables_and_json_hold_every_figure() -> None:
    parts = break_down(batch(), width=4)
    console = Console(width=200, record=True)
    for table in breakdown_tables(parts):
        console.print(table)
    text = console.export_text()
    assert "b[/]" in text and "unfiltered" in text and "8-11" in text and "unknown" in text
    figures = json.loads(json.dumps(breakdown_json(parts), allow_nan=False))
    assert figures["probe"]["best_shift"] == 0 and figures["probe"]["alarm"] is False
    assert len(figures["slices"]["position"]) == 3 and figures["worst"][0]["token_id"] == 17
