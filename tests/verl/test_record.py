"""The listener in front of veRL's own function, with veRL's own batch."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.utils.debug import metrics

from trainer_bridge.store.reader import RunStore
from trainer_bridge.verl import record


def batch(delta: float) -> DataProto:
    rollout = -torch.rand(4, 5) - 0.1
    tensors = {
        "prompts": torch.ones(4, 3, dtype=torch.int64), "responses": torch.ones(4, 5, dtype=torch.int64),
        "response_mask": torch.ones(4, 5, dtype=torch.int64), "attention_mask": torch.ones(4, 8, dtype=torch.int64),
        "old_log_probs": rollout + delta, "rollout_log_probs": rollout,
    }  # fmt: skip
    uid = np.array(list("aabb"), dtype=object)
    return DataProto.from_dict(tensors, non_tensors={"uid": uid}, meta_info={"temperature": 1.0, "global_steps": 3})


def test_verls_metrics_stay_and_the_step_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    inner = record.make_recorder
    monkeypatch.setattr(record, "make_recorder", lambda *a: made.append(inner(*a)) or made[0])
    monkeypatch.setenv(record.VARIABLE, str(tmp_path))
    monkeypatch.setenv(f"{record.VARIABLE}_RUN", "run")
    monkeypatch.setattr(metrics, "calculate_debug_metrics", metrics.calculate_debug_metrics)
    plain = metrics.calculate_debug_metrics
    assert record.install() and record.install()
    trainer = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    monkeypatch.setattr(trainer, "calculate_debug_metrics", trainer.calculate_debug_metrics)
    assert record.install() and trainer.calculate_debug_metrics is metrics.calculate_debug_metrics
    for delta in (0.0, 0.25):
        data = batch(delta)
        said, expected = metrics.calculate_debug_metrics(data), plain(data)
        assert {k: str(v) for k, v in said.items()} == {k: str(v) for k, v in expected.items()}
    assert made[0].close().written == 2
    store = RunStore(tmp_path)
    store.refresh()
    figures = store.figures("run")
    assert list(figures) == [3, 4] and [f["equal_tokens"] for f in figures.values()] == [20, 0]
