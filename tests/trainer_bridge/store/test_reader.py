"""Reading runs: figures equal those of ``compare``, over one writer or several, restarts and retention included."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from rollout.errors import NotFound
from tests.trainer_bridge.store.runs import CAUSE, batch, record_run
from trainer_bridge.compare import compare
from trainer_bridge.records import ScoredSample
from trainer_bridge.report import to_json
from trainer_bridge.store import reader
from trainer_bridge.store.facts import RunHead, StepFacts
from trainer_bridge.store.files import write_text
from trainer_bridge.store.reader import RunStore
from trainer_bridge.store.recorder import Recorder
from trainer_bridge.store.retention import prune

ROUNDED_APART = {"probs_diff_std", "pearson"}
"""Figures that need two passes: over several parts they may differ in the last digits, and are documented so."""


def figures_of(samples: list[ScoredSample]) -> dict[str, object]:
    figures = json.loads(json.dumps(to_json(compare(samples))))
    del figures["verdict"]
    return figures  # type: ignore[no-any-return]


def read(root: Path) -> RunStore:
    store = RunStore(root)
    store.refresh()
    return store


def record_parts(root: Path, parts: list[list[ScoredSample]], step: int = 0) -> None:
    for rank, samples in enumerate(parts):
        recorder = Recorder(root, RunHead("run"), writer=f"rank{rank}")
        recorder.record(StepFacts(step, weight_version=step), samples, compare(samples))
        assert recorder.close().written == 1


def test_one_writer_gives_what_compare_said(tmp_path: Path) -> None:
    comparisons, _ = record_run(tmp_path, broken_from=1)
    figures = read(tmp_path).figures("run")
    assert list(figures) == [0, 1, 2]
    for step, comparison in enumerate(comparisons):
        said = json.loads(json.dumps(to_json(comparison)))
        del said["verdict"]
        assert {name: figures[step][name] for name in said} == said
    assert figures[1]["findings"] == [CAUSE] and figures[0]["findings"] == []
    assert figures[0]["tokens_per_s"] == comparisons[0].tokens / 2.0
    assert figures[0]["ess"] == 1.0 and 0 < figures[1]["ess"] < 1


@pytest.mark.parametrize("broken", [False, True])
def test_several_writers_give_what_compare_says_of_all_samples(tmp_path: Path, broken: bool) -> None:
    parts = [batch(seed, broken=broken, step=seed) for seed in range(3)]
    record_parts(tmp_path, parts)
    merged = read(tmp_path).figures("run")[0]
    whole = figures_of([s for part in parts for s in part])
    for name, value in whole.items():
        if name in ROUNDED_APART:
            assert merged[name] == pytest.approx(value, rel=1e-9, abs=1e-15), name
        else:
            assert merged[name] == value, name
    assert merged["parts"] == 3
    means = [np.float64(figures_of(part)["mean_abs"]) for part in parts]
    assert not broken or float(np.mean(means)) != whole["mean_abs"], "control: a mean of means is another figure"


def test_a_restarted_writer_replaces_its_step_and_no_other_writers(tmp_path: Path) -> None:
    old, other, new = batch(0, broken=True), batch(1), batch(2)
    record_parts(tmp_path, [old, other])
    assert read(tmp_path).figures("run")[0]["tokens"] == figures_of(old + other)["tokens"]
    record_parts(tmp_path, [new])
    assert read(tmp_path).figures("run")[0]["tokens"] == figures_of(new + other)["tokens"]
    assert read(tmp_path).figures("run")[0]["bitwise_equal"] is True


def test_a_store_sees_new_steps_and_only_then_changes(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    assert store.refresh() == set() and store.names() == []
    record_run(tmp_path / "runs", "a", steps=1)
    assert store.refresh() == {"a"}
    assert store.refresh() == set()
    before = store.revision("a")
    samples = batch(9)
    recorder = Recorder(tmp_path / "runs", RunHead("a"), writer="rank0-test")
    recorder.record(StepFacts(5), samples, compare(samples))
    recorder.close()
    assert store.refresh() == {"a"} and store.revision("a") > before
    assert list(store.figures("a")) == [0, 5]


def test_cells_add_up_to_the_tokens_in_every_dimension(tmp_path: Path) -> None:
    comparisons, _ = record_run(tmp_path, broken_from=1)
    store = read(tmp_path)
    for dimension in ("delta", "ulp", "probability", "position", "length", "replica", "version", "filter"):
        assert [step for step, _ in store.cells("run", dimension)] == [0, 1, 2]
        for (_, cells), comparison in zip(store.cells("run", dimension), comparisons, strict=True):
            assert cells.tokens.sum() == comparison.tokens, dimension
            assert cells.unequal.sum() == comparison.unequal_tokens, dimension
            assert cells.max_abs.max() == comparison.max_abs, dimension
    assert {key for _, cells in store.cells("run", "filter") for key in cells.key} == {"none", "top_k=50"}
    assert [cells.key for _, cells in store.cells("run", "version")] == [("0",), ("1",), ("2",)]
    assert [step for step, _ in store.cells("run", "ulp", 1, 1)] == [1] and store.cells("run", "none") == []


def test_reading_files_keeps_no_one_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_run(tmp_path, "a", steps=1)
    store = read(tmp_path)
    record_run(tmp_path, "b", steps=1)
    seen: list[list[str]] = []
    inner = reader._read_part

    def slow(path: Path) -> reader.Part | None:
        # From another thread, as a request: the lock is free while the disk is read.
        asked = threading.Thread(target=lambda: seen.append(store.names()))
        asked.start()
        asked.join(30)
        return inner(path)

    monkeypatch.setattr(reader, "_read_part", slow)
    assert store.refresh() == {"b"}
    assert seen == [["a"]] and store.names() == ["b", "a"]


def test_worst_tokens_are_the_worst_and_carry_their_context(tmp_path: Path) -> None:
    comparisons, _ = record_run(tmp_path, broken_from=2)
    total, worst = read(tmp_path).worst("run")
    assert total == len(worst) == min(64, comparisons[2].unequal_tokens)
    assert worst[0]["abs_delta"] == comparisons[2].max_abs and worst[0]["step"] == 2
    assert [w["abs_delta"] for w in worst] == sorted((w["abs_delta"] for w in worst), reverse=True)
    assert all(w["text"].strip() for w in worst)
    assert read(tmp_path).worst("run", 0, 1) == (0, [])
    assert read(tmp_path).worst("run", limit=5) == (total, worst[:5])


def test_a_sample_comes_back_whole(tmp_path: Path) -> None:
    record_run(tmp_path, broken_from=1)
    store = read(tmp_path)
    expected = batch(1, broken=True, version=1, step=1)[3]
    found = store.sample("run", 1, expected.request_id, expected.sample_index)
    columns = found["token_columns"]
    bits = columns.column("trainer_bits").to_numpy().astype(np.int32)
    assert np.array_equal(bits, expected.trainer_logprobs.view(np.int32))
    assert columns.column("token_id").to_pylist() == expected.token_ids.tolist()
    assert found["seed"] == str(expected.seed) and int(found["seed"]) > 2**63 - 1
    assert found["spans"] == [{"version": 1, "start": 0, "end": expected.token_ids.size}]
    with pytest.raises(NotFound, match="keeps no sample 9"):
        store.sample("run", 1, expected.request_id, 9)
    with pytest.raises(NotFound, match="has no step 7"):
        store.sample("run", 7, "r", 0)
    with pytest.raises(NotFound, match="no run 'other'"):
        store.figures("other")


def test_foreign_and_broken_files_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record_run(tmp_path)
    steps = tmp_path / "run=run/steps/step=1"
    (steps / "broken.parquet").write_bytes(b"PAR1 not really")
    (steps / ".partial.parquet").write_bytes(b"half")
    (tmp_path / "run=empty").mkdir()
    write_text(tmp_path / "run=foreign/run.json", "[]")
    store = read(tmp_path)
    assert store.names() == ["run"] and list(store.figures("run")) == [0, 1, 2]
    assert "broken.parquet is not a readable part" in caplog.text and ".partial" not in caplog.text


def test_retention_takes_tokens_of_old_runs_first_then_runs_never_the_newest(tmp_path: Path) -> None:
    for i, name in enumerate(("oldest", "middle", "newest")):
        record_run(tmp_path, name, broken_from=0, created=1000.0 + i)
    store = read(tmp_path)
    assert store.names() == ["newest", "middle", "oldest"]
    sizes = {name: store.size_bytes(name) for name in store.names()}
    removed = prune(tmp_path, max_bytes=sum(sizes.values()) - 1)
    assert [(r.run, r.what) for r in removed] == [("oldest", "tokens")]
    store.refresh()
    assert store.figures("oldest")[0]["tokens"] > 0, "figures outlive the tokens"
    with pytest.raises(NotFound, match="retention may have removed"):
        store.sample("oldest", 0, "step0/p0", 0)
    removed = prune(tmp_path, max_bytes=0)
    assert [(r.run, r.what) for r in removed] == [("middle", "tokens"), ("oldest", "run"), ("middle", "run")]
    assert read(tmp_path).names() == ["newest"] and read(tmp_path).size_bytes("newest") == sizes["newest"]
    assert store.refresh() >= {"middle", "oldest"} and store.names() == ["newest"]


def test_retention_by_count_and_partials_of_dead_writers(tmp_path: Path) -> None:
    for i in range(3):
        record_run(tmp_path, f"r{i}", steps=1, created=1000.0 + i)
    old, young = (tmp_path / "run=r2/steps/step=0" / name for name in (".dead", ".alive"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert [r.run for r in prune(tmp_path, keep_runs=1)] == ["r1", "r0"]
    assert not old.exists() and young.exists()
