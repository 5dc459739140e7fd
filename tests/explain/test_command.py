"""``explain`` and ``replay`` as they are called: on files, on recorded runs, with other weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from rollout import cli
from rollout.types import Float32Array
from rollout.weights import model_digest
from tests.engines import random_prompt, shared_model
from tests.explain.bench import Bench, one_thread
from trainer_bridge.cli import register
from trainer_bridge.compare import compare
from trainer_bridge.explain.source import read_samples
from trainer_bridge.jsonl import write_rollouts
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.store.facts import RunHead, SampleFacts, StepFacts
from trainer_bridge.store.recorder import Recorder, RecordOptions


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def bench(tiny_qwen3_path: Path) -> Bench:
    return Bench(tiny_qwen3_path, torch.float32)


def records(bench: Bench) -> list[RolloutRecord]:
    return [dataclasses.replace(bench.record(random_prompt(9 + i, i)), request_id=f"r{i}") for i in range(3)]


def score(bench: Bench, record: RolloutRecord) -> Float32Array:
    """As the aligned trainer does."""
    with bench.trainer.kernels.invariant_mode():
        return bench.score(record)


def call(path: Path, *words: str) -> Result:
    if not any(c.callback is not None and c.callback.__name__ == "explain" for c in cli.app.registered_commands):
        register(cli.app)
    common = [f"model.path={path}", "model.dtype=float32", "engine.page_size=16", "model.context_length=512"]
    return CliRunner().invoke(cli.app, [*words, *common])


def recorded(root: Path, bench: Bench, *, broken: bool, digest: str) -> Path:
    """Two steps of three samples; broken: in step 1 the trainer left the temperature out."""
    recorder = Recorder(root, RunHead("run", source="test"), options=RecordOptions(keep_rate=1.0))
    for step in range(2):
        taken = records(bench)
        scored = []
        for record in taken:
            values = score(bench, record)
            if broken and step == 1:
                values = score(bench, dataclasses.replace(record, sampling=dataclasses.replace(
                    record.sampling, temperature=1.0)))  # type: ignore[type-var]  # fmt: skip
            scored.append(record.scored(values))
        facts = [SampleFacts(record.sampling, 1.0) for record in taken]
        assert recorder.record(StepFacts(step, step, digest), scored, compare(scored), facts)
    assert recorder.close().written == 2
    return root / "run=run"


def digest_of(bench: Bench) -> str:
    return model_digest(shared_model(bench.path, torch.float32))


def test_a_run_holds_the_bits_that_were_recorded(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path, bench, broken=True, digest="ab")
    found = {s.record.request_id: s for s in read_samples(run, 0)}
    for record in records(bench):
        stored = found[record.request_id].record
        assert stored.policy_logprobs.tobytes() == record.policy_logprobs.tobytes()
        assert stored.token_ids.tolist() == record.token_ids.tolist()
        assert (stored.sampling, stored.seed, stored.finish) == (record.sampling, record.seed, record.finish)
    assert [s.where for s in read_samples(run)] == ["step 0"] * 3 + ["step 1"] * 3
    values = read_samples(run, 1)[0]
    assert values.trainer_logprobs is not None and values.weights_digest == "ab"
    assert not np.array_equal(values.trainer_logprobs, values.record.policy_logprobs)


def test_explain_of_a_run_takes_the_first_step_that_differs(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path, bench, broken=True, digest=digest_of(bench))
    out = tmp_path / "e.json"
    found = call(bench.path, "explain", str(run), "--json", str(out))
    assert found.exit_code == 1, found.output
    assert "step 1 request" in found.output and "the temperature was left out" in found.output
    assert "note:" not in found.output
    value: dict[str, Any] = json.loads(out.read_text())
    assert (value["cause"], value["kind"], value["line"]) == ("semantics", "temperature", 3)
    sound = call(bench.path, "explain", str(run), "--step", "0")
    assert sound.exit_code == 0 and "no difference" in sound.output


def test_a_run_of_other_weights_is_said_to_be_one(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path, bench, broken=True, digest="cd" * 32)
    found = call(bench.path, "explain", str(run))
    assert found.exit_code == 1 and "note: step 1 was sampled under weights cdcdcdcdcdcdcdcd" in found.output
    refused = call(bench.path, "replay", str(run), "--step", "0")
    assert refused.exit_code == 1 and "were sampled under cdcd" in str(refused.exception)


def test_replay_of_a_run(bench: Bench, tmp_path: Path) -> None:
    run = recorded(tmp_path, bench, broken=True, digest=digest_of(bench))
    found = call(bench.path, "replay", str(run))
    assert found.exit_code == 0 and "6 of 6 samples regenerated bit for bit" in found.output, found.output


def test_replay_says_where_not(bench: Bench, tmp_path: Path) -> None:
    first, *rest = records(bench)
    values = first.policy_logprobs.copy()
    values[4] = np.nextafter(values[4], np.float32(0))
    write_rollouts(tmp_path / "r.jsonl", [dataclasses.replace(first, policy_logprobs=values), *rest])
    found = call(bench.path, "replay", str(tmp_path / "r.jsonl"))
    assert found.exit_code == 1 and "2 of 3 samples" in found.output
    assert "r0 sample 0: UNEQUAL: token 4: log-prob" in found.output and "(1 ULP)" in found.output


def test_explain_of_a_file(bench: Bench, tmp_path: Path) -> None:
    """Clean; then with the trainer's own file, in which the third sample lost its last token."""
    taken = records(bench)
    write_rollouts(tmp_path / "r.jsonl", taken)
    sound = call(bench.path, "explain", str(tmp_path / "r.jsonl"), "--thorough")
    assert sound.exit_code == 0 and "every tap hold equal bits" in sound.output, sound.output
    theirs = [dataclasses.replace(r, policy_logprobs=score(bench, r), behavior_logprobs=None) for r in taken]
    theirs[2] = dataclasses.replace(
        theirs[2], token_ids=theirs[2].token_ids[:-1], policy_logprobs=theirs[2].policy_logprobs[:-1],
        mask=theirs[2].mask[:-1], row_digests=None,
    )  # fmt: skip
    write_rollouts(tmp_path / "t.jsonl", theirs)
    found = call(bench.path, "explain", str(tmp_path / "r.jsonl"), "--trainer", str(tmp_path / "t.jsonl"))
    assert found.exit_code == 1 and "request 'r2'" in found.output and "lacks the last 1 token" in found.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{file}", "--step", "0"], "steps belong to a run's folder"),
        (["{folder}"], "is not a run's folder"),
        (["{run}", "--step", "7"], "has no step 7; it has 0, 1"),
        (["{file}", "--sample", "9"], "holds 3 lines"),
    ],
)
def test_wrong_calls_are_told(bench: Bench, tmp_path: Path, words: list[str], said: str) -> None:
    run = recorded(tmp_path / "runs", bench, broken=False, digest="ab")
    write_rollouts(tmp_path / "r.jsonl", records(bench))
    places = {"file": str(tmp_path / "r.jsonl"), "folder": str(tmp_path), "run": str(run)}
    refused = call(bench.path, "explain", *(word.format(**places) for word in words))
    assert refused.exit_code == 1 and said in str(refused.exception)
