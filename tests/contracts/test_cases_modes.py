"""A9: the log-prob mode and its values do not depend on which path of the engine computed them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.events import ScoreEvent
from rollout.types import LogprobMode, SampleEvent, ScoreSequence
from tests.engines import build_engine, sample, shared_model, train_forward
from trainer_bridge.forward import TrainingSample

PROMPT = (5, 6, 7, 8)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "modules"])
def test_every_path_tempers_alike(tiny_qwen3_path: Path, fused: bool, temperature: float) -> None:
    model = shared_model(tiny_qwen3_path, torch.float32, 16)
    engine = build_engine(model, fused=fused)
    request = engine.effective_request(sample(PROMPT, "s", temperature=temperature, max_tokens=12))
    assert request.sampling.logprob_mode is LogprobMode.TEMPERED
    engine.add(request)
    chunks = [e.chunk for e in _drain(engine) if isinstance(e, SampleEvent) and e.chunk is not None]
    ids = np.concatenate([c.token_ids for c in chunks])
    sampled = np.concatenate([c.policy_logprobs for c in chunks])
    engine.add_score("x", ScoreSequence((*PROMPT, *ids.tolist()), 4), temperature=temperature, want_digests=False)
    (scored,) = [e.score.logprobs for e in _drain(engine) if isinstance(e, ScoreEvent)]
    trained = train_forward(model, [TrainingSample(np.array(PROMPT, np.int32), ids, temperature)])
    assert sampled.tobytes() == scored.tobytes() == np.asarray(trained[0][0]).tobytes()
    untempered = train_forward(model, [TrainingSample(np.array(PROMPT, np.int32), ids, 1.0)])
    assert (sampled.tobytes() == np.asarray(untempered[0][0]).tobytes()) == (temperature == 1.0), "control"


def _drain(engine: object) -> list[object]:
    events: list[object] = []
    with engine.model.kernels.invariant_mode():  # type: ignore[attr-defined]
        while engine.num_running or engine.num_waiting:  # type: ignore[attr-defined]
            events += engine.step()  # type: ignore[attr-defined]
    return events
