"""A sample of the planted-fault suite and of its clean runs; `make explain-suite` runs all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.explain.bench import FAULTS, Fault, one_thread
from tests.explain.suite import REAL, Models, clean_runs, real_faults, run_fault
from trainer_bridge.explain.findings import Cause
from trainer_bridge.explain.view import render, to_json, verdict

SAMPLE = FAULTS[::3]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("explain"))


def test_the_suite_is_large_and_covers_every_class() -> None:
    assert len(FAULTS) >= 40 and len({f.name for f in FAULTS}) == len(FAULTS)
    causes = {cause: sum(f.cause is cause for f in FAULTS) for cause in Cause}
    assert all(causes[c] >= 10 for c in (Cause.WEIGHTS, Cause.INPUTS, Cause.SEMANTICS, Cause.NUMERICS))
    assert {f.cause for f in SAMPLE} == {Cause.WEIGHTS, Cause.INPUTS, Cause.SEMANTICS, Cause.NUMERICS}
    assert len(real_faults()) == len(REAL)


@pytest.mark.parametrize("fault", SAMPLE, ids=lambda f: f.name)
def test_fault(fault: Fault, models: Models) -> None:
    outcome = run_fault(fault, models)
    assert outcome.right, verdict(outcome.explanation)


def test_clean_runs_raise_no_alarm(models: Models) -> None:
    explanations = list(clean_runs(models, 15))
    assert [verdict(e) for e in explanations if e.cause is not Cause.NONE] == []
    # Each was really asked: down to whether company changes either side.
    assert all(sum(row.stage == "numerics" for row in e.evidence) >= 4 for e in explanations)


def test_a_wrong_verdict_would_be_seen(models: Models) -> None:
    """The suite's own check can fail: the same explanation under another expectation is not right."""
    import dataclasses

    outcome = run_fault(FAULTS[0], models)
    for change in ({"cause": Cause.UNKNOWN}, {"place": "elsewhere"}, {"kind": "other"}, {"words": "moon"}):
        assert not dataclasses.replace(outcome, fault=dataclasses.replace(FAULTS[0], **change)).right


def test_output(models: Models) -> None:
    """One sentence, a table, JSON without NaN."""
    by_name = {f.name: f for f in FAULTS}
    explanation = run_fault(by_name["SDPA instead of flash attention"], models).explanation
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render(explanation, console)
    console.file.close()
    text = console.export_text()
    assert "evidence" in text and verdict(explanation) in text.replace("\n", " ")
    value = json.loads(json.dumps(to_json(explanation), allow_nan=False))
    assert value["cause"] == "numerics" and value["place"] == "layers.0.attention"
    assert value["details"]["max_ulp"] > 0 and value["details"]["shape"] == [4, 16]
    assert [e["stage"] for e in value["evidence"]][:3] == ["compare", "weights", "inputs"]


@pytest.mark.model
def test_on_the_real_model(models: Models, smollm2_path: Path) -> None:
    by_name = {f.name: f for f in real_faults()}
    for name in ("temperature rounded to bfloat16", "RoPE theta"):
        outcome = run_fault(by_name[name], models)
        assert outcome.right, verdict(outcome.explanation)
