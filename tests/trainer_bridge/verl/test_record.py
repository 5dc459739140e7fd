"""veRL's batches in the record, with stand-ins for veRL's objects; ``tests/verl/test_record.py`` uses veRL's own."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.errors import ConfigError, ParityError, RolloutError
from trainer_bridge.store.facts import RunHead
from trainer_bridge.store.reader import RunStore
from trainer_bridge.store.recorder import Recorder, RecordOptions
from trainer_bridge.verl import record
from trainer_bridge.verl.record import (
    BatchListener,
    check_environment,
    listening,
    make_recorder,
    record_options,
    samples_of,
)


def whole(step: int | None = None, *, broken: bool = False, rows: int = 3) -> Any:
    """A V0 batch: prompts on the left, responses on the right, NaN where nothing may be read."""
    width, prompt = 6, 4
    lengths = [width - i for i in range(rows)]
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    mask[0, 1] = 0
    rollout = -torch.rand(rows, width, generator=torch.Generator().manual_seed(rows)) - 0.5
    trainer = rollout.clone()
    if broken:
        trainer[1, 2] = torch.nextafter(trainer[1, 2], torch.tensor(0.0))
    for side in (rollout, trainer):
        side[mask == 0] = torch.nan
    attention = torch.cat(
        [torch.ones(rows, prompt, dtype=torch.int64), (torch.arange(width) < torch.tensor(lengths)[:, None]).long()], 1
    )
    scores = torch.zeros(rows, width)
    scores[:, 0] = torch.arange(rows) / 2
    batch = {
        "prompts": torch.arange(rows * prompt).reshape(rows, prompt),
        "responses": torch.arange(rows * width).reshape(rows, width),
        "response_mask": mask, "attention_mask": attention, "old_log_probs": trainer, "rollout_log_probs": rollout,
        "rm_scores": scores,
    }  # fmt: skip
    details = [{"spans": [(7, 0, n)], "replica": "replica-1", "manifest_digest": "ab"} for n in lengths]
    return SimpleNamespace(
        batch=batch,
        meta_info={"temperature": 0.7} | ({} if step is None else {"global_steps": step}),
        non_tensor_batch={"zerodrift": np.array(details, dtype=object), "uid": np.array(list("aab"), dtype=object)},
    )


def responses_only() -> Any:
    """What the V1 trainer passes."""
    data = whole(broken=True)
    for name in ("prompts", "attention_mask", "rm_scores"):
        del data.batch[name]
    return SimpleNamespace(batch=data.batch, meta_info={}, non_tensor_batch={})


def listener(root: Path) -> tuple[BatchListener, Recorder]:
    recorder = Recorder(root, RunHead("run", source="verl"), options=RecordOptions(keep_rate=1.0))
    return BatchListener(recorder), recorder


def read(root: Path) -> RunStore:
    store = RunStore(root)
    store.refresh()
    return store


def test_every_batch_is_a_step(tmp_path: Path) -> None:
    listen, recorder = listener(tmp_path)
    for data in (whole(4), whole(), whole(9, broken=True), responses_only()):
        listen(data)
    assert recorder.close().written == 4
    store = read(tmp_path)
    figures = store.figures("run")
    assert list(figures) == [4, 5, 9, 10], "named steps, else one after another"
    assert [f["unequal_tokens"] for f in figures.values()] == [0, 0, 1, 1]
    assert {f["tokens"] for f in figures.values()} == {5 + 5 + 4}
    assert [f["weight_version"] for f in figures.values()] == [7, 7, 7, None]
    assert figures[4]["mean_reward"] == 0.5 and figures[10]["mean_reward"] is None
    first = figures[9]["first_mismatch"]
    assert (first["request_id"], first["position"], first["replica"]) == ("a/1", 2, "replica-1")
    sample = store.sample("run", 9, "a/1", 0)
    assert sample["reward"] == 0.5 and sample["manifest_digest"] == "ab" and sample["prompt_ids"] == [4, 5, 6, 7]


def test_a_batch_that_cannot_be_read_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listen, recorder = listener(tmp_path)
    listen(SimpleNamespace(batch={}, meta_info={}, non_tensor_batch={}))
    listen(whole())
    assert recorder.close().written == 1 and "is not recorded; training goes on" in caplog.text


def test_the_inner_function_sees_the_batch_as_it_was(tmp_path: Path) -> None:
    seen: list[Any] = []
    made: list[int] = []

    def inner(data: Any) -> dict[str, Any]:
        """veRL's."""
        return {"training/x": data}

    def make() -> Any:
        made.append(1)
        return seen.append

    both = listening(inner, make)
    assert both("a") == {"training/x": "a"} and both("b") == {"training/x": "b"}
    assert seen == ["a", "b"] and made == [1] and both.__doc__ == "veRL's."


def test_nothing_is_installed_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(record.VARIABLE, raising=False)
    assert record.install() is False
    monkeypatch.setenv(record.VARIABLE, "runs")
    monkeypatch.setattr(record.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pyarrow is missing"):
        record.install()


def test_the_environment_names_run_and_share(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    recorder = make_recorder(tmp_path, {"ZERODRIFT_RECORD_RUN": "grpo", "ZERODRIFT_RECORD_KEEP": "0"})
    BatchListener(recorder)(whole())
    assert recorder.close().written == 1
    figures = read(tmp_path).figures("grpo")
    assert figures[1]["kept_samples"] == 0 and "run grpo is recorded in" in caplog.text


def test_the_environment_is_judged_before_the_training(tmp_path: Path) -> None:
    """Each of these ended the run with a traceback, at its first batch."""
    for fields, match in (
        ({"KEEP": "abc"}, "KEEP='abc' is not a number"),
        ({"KEEP": "2"}, "KEEP='2'"),
        ({"KEEP": "nan"}, "KEEP='nan'"),
        ({"RUN": "a/b"}, "run name 'a/b'"),
        ({"MODEL": str(tmp_path)}, r"no tokenizer\.json"),
    ):
        with pytest.raises(RolloutError, match=match):
            check_environment({f"ZERODRIFT_RECORD_{name}": value for name, value in fields.items()})
    check_environment({})
    assert record_options({"ZERODRIFT_RECORD_KEEP": "0.5"}).keep_rate == 0.5
    assert list(tmp_path.iterdir()) == []


def test_a_batch_of_responses_is_labelled_with_the_rollouts_temperature() -> None:
    """It was labelled 1.0, whatever it had been sampled at."""
    batch = {
        "old_log_probs": torch.tensor([[-1.0, -2.0]]),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0]]),
        "response_mask": torch.tensor([[1, 1]]),
        "responses": torch.tensor([[4, 5]]),
    }

    def labels(told: Any, stated: float | None) -> float:
        columns = {} if told is None else {"zerodrift": np.array([{"temperature": told}], object)}
        meta = {} if stated is None else {"temperature": stated}
        return samples_of(SimpleNamespace(batch=batch, non_tensor_batch=columns, meta_info=meta))[0].temperature

    assert (labels(0.5, None), labels(None, 0.5), labels(None, None)) == (0.5, 0.5, 1.0)
    with pytest.raises(ParityError, match=r"sampled at temperature 0\.5"):
        labels(0.5, 1.0)
