"""Verdict line, table and JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import numpy as np
from rich.console import Console

from rollout.types import VersionSpan
from tests.trainer_bridge.samples import f32, sample
from trainer_bridge.compare import compare
from trainer_bridge.records import Comparison
from trainer_bridge.report import render, to_json, verdict


def printed(comparison: Comparison, width: int = 60) -> str:
    stream = io.StringIO()
    render(comparison, Console(file=stream, width=width, force_terminal=False))
    return stream.getvalue()


def test_verdict_of_equal_bits() -> None:
    many = [sample([-1.0] * 4096, request_id=f"r{i}") for i in range(3)]
    assert verdict(compare(many)) == "bitwise equal: 12,288 / 12,288 tokens"


def test_verdict_counts_and_names_the_first_unequal_token() -> None:
    spans = (VersionSpan(3, 0, 2),)
    off = sample([-1.0, -2.0], [-1.0, -2.5], request_id="r 1", sample_index=4, spans=spans, replica="w1")
    line = verdict(compare([sample(), off]))
    assert line == (
        "UNEQUAL: 1 of 4 tokens; first at request 'r 1' sample 4 token 1 (absolute 4, id 11): "
        "rollout -2.0 (0xc0000000), trainer -2.5 (0xc0200000), 2,097,152 ULP [weights v3, replica w1]"
    )


def test_verdict_of_unequal_digests_only() -> None:
    one, two = np.array([1, 2], dtype=np.uint64), np.array([1, 3], dtype=np.uint64)
    line = verdict(compare([sample(rollout_digests=one, trainer_digests=two)]))
    assert line.startswith("UNEQUAL: 0 of 2 tokens, 1 / 2 row digests; first unequal row digest at request 'r0'")
    equal = verdict(compare([sample(rollout_digests=one, trainer_digests=one)]))
    assert equal == "bitwise equal: 2 / 2 tokens, 2 / 2 row digests"


def test_no_data_is_said_and_never_called_equal() -> None:
    nothing = compare([sample([np.nan], [np.nan], [0])])
    assert verdict(nothing) == "no data: 1 samples, none with a token to compare"
    assert "no data" in printed(nothing) and "bitwise equal" not in printed(nothing)


def test_report_without_a_terminal_is_plain_and_keeps_the_verdict_on_one_line() -> None:
    comparison = compare([sample([-1.0, -2.0], [-1.0, -2.5], request_id="[bold]x[/bold]")])
    text = printed(comparison)
    assert "\x1b" not in text
    assert verdict(comparison) in text.splitlines()
    assert "[bold]x[/bold]" in text


def test_filtered_samples_show_kept_mass_in_its_own_row() -> None:
    filtered = compare([sample([-1.5], filtered=True, behavior_logprobs=f32([-1.25]))])
    row = next(line for line in printed(filtered).splitlines() if "kept mass" in line)
    assert "-0.25" in row and verdict(filtered).startswith("bitwise equal")


def test_json_has_every_figure_and_is_standard_json() -> None:
    comparison = compare([sample([-2000.0, -1.0], [-1.0, -2000.0])])
    data = to_json(comparison)
    assert {field.name for field in dataclasses.fields(Comparison)} <= data.keys()
    read = json.loads(json.dumps(data, allow_nan=False))
    assert read["k3"] == "inf" and read["mean_log_kept_mass"] is None
    assert read["first_mismatch"]["position"] == 0 and read["unequal_tokens"] == 2
    assert read["max_abs"] == comparison.max_abs and math.isnan(comparison.mean_log_kept_mass)
    assert read["ulp_histogram"][0] == {"low": 0, "high": 0, "count": 0}
