"""Scalars for other tools: verl's names, nothing without data, and a clear word when a package is missing."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.errors import ConfigError
from rollout.metrics import PrometheusMeter
from tests.trainer_bridge.samples import sample
from tests.trainer_bridge.store.runs import batch
from trainer_bridge.compare import compare
from trainer_bridge.store.facts import RunHead, StepFacts
from trainer_bridge.store.recorder import Recorder
from trainer_bridge.store.sinks import mlflow_sink, on_step, scalars_of, tensorboard_sink, wandb_sink

STEP = StepFacts(7, weight_version=3, rewards=(0.0, 1.0), seconds={"rollout": 2.0})


def test_scalars_are_the_comparison_under_verls_names() -> None:
    comparison = compare(batch(0, broken=True))
    scalars = scalars_of(STEP, comparison)
    assert scalars["training/rollout_probs_diff_max"] == comparison.probs_diff_max
    assert scalars["rollout_corr/k3_kl"] == comparison.k3
    assert scalars["zerodrift/unequal_tokens"] == comparison.unequal_tokens > 0
    assert scalars["zerodrift/tokens_per_s"] == comparison.tokens / 2.0 and scalars["zerodrift/mean_reward"] == 0.5
    empty = scalars_of(StepFacts(0), compare([sample([float("nan")], mask=[0])]))
    assert set(empty) == {"zerodrift/tokens", "zerodrift/unequal_tokens", "zerodrift/bitwise_equal"}


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    for key, value in content.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_each_sink_calls_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any, Any]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            seen.append(("open", folder, None))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append((name, value, step))

        def flush(self) -> None:
            seen.append(("flush", None, None))

    fake(monkeypatch, "torch.utils.tensorboard", SummaryWriter=Writer)
    tensorboard_sink("tb")(7, {"a": 1.0})
    assert seen == [("open", "tb", None), ("a", 1.0, 7), ("flush", None, None)]
    run = types.SimpleNamespace(log=lambda scalars, step: seen.append(("wandb", scalars, step)))
    fake(monkeypatch, "wandb", run=run)
    wandb_sink()(7, {"a": 1.0})
    fake(monkeypatch, "mlflow", active_run=lambda: 1, log_metrics=lambda s, step: seen.append(("mlflow", s, step)))
    mlflow_sink()(7, {"a": 1.0})
    assert seen[-2:] == [("wandb", {"a": 1.0}, 7), ("mlflow", {"a": 1.0}, 7)]
    fake(monkeypatch, "wandb", run=None)
    with pytest.raises(ConfigError, match=r"call wandb\.init"):
        wandb_sink()
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match="pip install mlflow"):
        mlflow_sink()


def test_the_recorder_feeds_sink_and_meter(tmp_path: Any) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    meter = PrometheusMeter()
    samples = batch(0, broken=True)
    comparison = compare(samples)
    recorder = Recorder(
        tmp_path, RunHead("r"), on_step=on_step(lambda step, scalars: seen.append((step, dict(scalars)))), meter=meter
    )
    recorder.record(STEP, samples, comparison)
    recorder.close()
    assert seen == [(7, scalars_of(STEP, comparison))]
    get = meter.registry.get_sample_value
    assert get("zerodrift_bridge_unequal_tokens_total", {"run": "r"}) == comparison.unequal_tokens
    assert get("zerodrift_bridge_logprob_abs_diff_max", {"run": "r"}) == comparison.max_abs
    assert get("zerodrift_bridge_steps_recorded", {"run": "r"}) == 1
    assert get("zerodrift_bridge_steps_dropped", {"run": "r"}) == 0


def test_tensorboard_itself_reads_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    comparison = compare(batch(0, broken=True))
    on_step(tensorboard_sink(str(tmp_path)))(STEP, comparison)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = scalars_of(STEP, comparison)
    assert set(events.Tags()["scalars"]) == set(scalars)
    for name, value in scalars.items():
        (event,) = events.Scalars(name)
        assert event.step == 7 and event.value == np.float32(value), name


def test_mlflow_itself_reads_back_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("zerodrift")
    comparison = compare(batch(0, broken=True))
    with mlflow.start_run() as run:
        on_step(mlflow_sink())(STEP, comparison)
    found = mlflow.tracking.MlflowClient().get_run(run.info.run_id).data.metrics
    assert found == scalars_of(STEP, comparison)


def test_wandb_itself_takes_what_is_written(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(dir=tmp_path, project="zerodrift", mode="offline") as run:
        on_step(wandb_sink())(STEP, compare(batch(0, broken=True)))
        assert run.step == 7
    assert list(tmp_path.rglob("*.wandb"))
