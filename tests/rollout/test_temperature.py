"""One range of temperatures on every path: what float32 makes 0 or infinite is refused, never divided by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.errors import InvalidRequest
from rollout.logprobs import effective_temperature
from rollout.temperature import checked_temperature
from rollout.types import ScoreSequence
from tests.engines import build_engine, drain, shared_model, train_forward
from trainer_bridge.forward import TrainingSample

BAD = [float("nan"), float("inf"), -1.0, 1e39, 1e-7, 1e-50, 10**400, True, "1"]


@pytest.mark.parametrize("value", BAD, ids=lambda v: str(v)[:8])
def test_refused_with_the_field(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"^temperature = ") as caught:
        checked_temperature(value, "sampling.temperature")
    assert caught.value.field == "sampling.temperature"


def test_rounded_once_and_zero_has_one_sign() -> None:
    assert checked_temperature(0.1, "temperature") == float(np.float32(0.1)) != 0.1
    assert str(checked_temperature(-0.0, "temperature")) == "0.0"
    assert [effective_temperature(t) for t in (0.0, -0.0, 0, 3)] == [1.0, 1.0, 1.0, 3.0]


@pytest.mark.parametrize("value", [1e-50, 1e39])
def test_scoring_and_the_training_forward_refuse_it_too(tiny_qwen3_path: Path, value: float) -> None:
    model = shared_model(tiny_qwen3_path, torch.float32)
    engine = build_engine(model)
    with pytest.raises(InvalidRequest, match="temperature = "):
        engine.add_score("s", ScoreSequence((1, 2, 3)), temperature=value, want_digests=False)
    assert drain(engine).samples == {}
    ids = np.array([3, 4], np.int32)
    with pytest.raises(InvalidRequest, match="temperature = "):
        train_forward(model, [TrainingSample(ids, ids, value)])
