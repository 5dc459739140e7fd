"""Scalars to TensorBoard, Weights & Biases or MLflow, for teams that live there. Each needs its own package.

``scalars_of`` names them as verl does where verl has a name, and ``zerodrift/...`` otherwise.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rollout.errors import ConfigError
from trainer_bridge.metrics import exact_mean
from trainer_bridge.records import Comparison
from trainer_bridge.store.facts import StepFacts

Sink = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its scalars."""


def scalars_of(step: StepFacts, comparison: Comparison) -> dict[str, float]:
    """Scalars of a step; what has no data is left out."""
    c = comparison
    rollout_s = step.seconds.get("rollout")
    figures = {
        "zerodrift/tokens": float(c.tokens),
        "zerodrift/unequal_tokens": float(c.unequal_tokens),
        "zerodrift/bitwise_equal": float(c.bitwise_equal),
        "zerodrift/logprob_abs_diff_max": c.max_abs,
        "zerodrift/logprob_abs_diff_p99": c.p99_abs,
        "zerodrift/max_ulp": math.nan if c.max_ulp is None else float(c.max_ulp),
        "training/rollout_probs_diff_max": c.probs_diff_max,
        "training/rollout_probs_diff_mean": c.probs_diff_mean,
        "training/rollout_probs_diff_std": c.probs_diff_std,
        "training/rollout_actor_probs_pearson_corr": c.pearson,
        "rollout_corr/kl": c.k1,
        "rollout_corr/k3_kl": c.k3,
        "zerodrift/weight_version": math.nan if step.weight_version is None else float(step.weight_version),
        "zerodrift/mean_reward": exact_mean(np.array(step.rewards, np.float64)),
        "zerodrift/tokens_per_s": c.tokens / rollout_s if rollout_s else math.nan,
    }
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def on_step(sink: Sink) -> Callable[[StepFacts, Comparison], None]:
    """A sink as ``Recorder`` takes it."""
    return lambda step, comparison: sink(step.step, scalars_of(step, comparison))


def tensorboard_sink(folder: str) -> Sink:
    """Event files in a folder. Errors: ConfigError without the package tensorboard."""
    writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter(folder)

    def write(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def wandb_sink() -> Sink:
    """The run that ``wandb.init`` started. Errors: ConfigError without the package or a run."""
    wandb = _module("wandb", "wandb")
    if wandb.run is None:
        raise ConfigError("no W&B run is active; call wandb.init before wandb_sink")
    return lambda step, scalars: wandb.run.log(dict(scalars), step=step)


def mlflow_sink() -> Sink:
    """The active MLflow run. Errors: ConfigError without the package or a run."""
    mlflow = _module("mlflow", "mlflow")
    if mlflow.active_run() is None:
        raise ConfigError("no MLflow run is active; call mlflow.start_run before mlflow_sink")
    return lambda step, scalars: mlflow.log_metrics(dict(scalars), step=step)


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"the sink needs the package {package}: pip install {package} ({error})") from error
