"""Taking turns: what is kept when all goes well, and when a runner fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.measure import Measurer, Plan
from benchmarks.results import Results, load_results
from benchmarks.runner import RunnerFailed
from benchmarks.workloads import decode_workload
from tests.benchmarks.fakes import SESSION, fake_spec

WORKS = (decode_workload(1, 8, 6), decode_workload(2, 8, 6))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    shape = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return Plan(tmp_path, WORKS, 2, 1, "s", tmp_path / "out" / "tiny.json", tmp_path / "logs")


def measured(plan: Plan, *others: object) -> Results:
    results = Results("tiny", sessions={"s": SESSION})
    Measurer(plan, results).block(fake_spec("zerodrift"), others)  # type: ignore[arg-type]
    kept = load_results(plan.out)
    assert kept == results
    return kept


def test_every_turn_is_a_pair_and_the_warm_up_is_not(plan: Plan) -> None:
    kept = measured(plan, fake_spec("vllm"), fake_spec("hf"))
    assert set(kept.pairs) == {f"{r}/{w.name}" for r in ("vllm", "hf") for w in WORKS}
    for pair in kept.pairs.values():
        assert len(pair.turns) == 2
        assert all(m.tokens == pair.workload.tokens for turn in pair.turns for m in turn)
    spread = kept.ours("n1", lambda m: m.tokens)
    assert spread is not None and spread.median == 6


def test_one_that_fails_half_way_keeps_its_turns_and_harms_nobody(plan: Plan) -> None:
    # Its jobs: warm-up and two turns of the first workload, then it dies in the warm-up of the second.
    kept = measured(plan, fake_spec("vllm", exit_at=4), fake_spec("hf"))
    assert len(kept.pairs["vllm/n1"].turns) == 2
    assert kept.pairs["vllm/n2"].turns == [] and "exit code 3" in kept.pairs["vllm/n2"].failure
    assert len(kept.pairs["hf/n2"].turns) == 2


def test_one_that_does_not_start_is_recorded(plan: Plan) -> None:
    kept = measured(plan, fake_spec("vllm", refuse="out of luck"), fake_spec("hf"))
    assert "out of luck" in kept.runners["vllm"]["failure"]
    assert "out of luck" in kept.pairs["vllm/n1"].failure
    assert len(kept.pairs["hf/n1"].turns) == 2


def test_without_zerodrift_there_is_nothing_to_measure(plan: Plan) -> None:
    with pytest.raises(RunnerFailed, match="zerodrift: ValueError: broken"):
        Measurer(plan, Results("tiny")).block(fake_spec("zerodrift", refuse="broken"), [fake_spec("hf")])
