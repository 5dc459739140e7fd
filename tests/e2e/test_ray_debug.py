"""Taps, tensors and logged digests of engines that live in Ray actors: explanations work there as in process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.activation_log import read_activations
from rollout.config import Settings
from rollout.errors import InvalidRequest, NotFound
from rollout.serving import running_service
from rollout.taps import LOGITS, TraceRequest
from tests.engines import fresh_model, random_prompt
from tests.services import sampling, tiny_settings
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.collect import records_of, training_sample
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause, Explanation
from trainer_bridge.explain.run import explain
from trainer_bridge.explain.server_side import ServerSide
from trainer_bridge.explain.sides import ModelSide
from trainer_bridge.forward import TrainingForward
from trainer_bridge.replay import replay_records
from trainer_bridge.rollout_record import RolloutRecord

pytestmark = [pytest.mark.ray, pytest.mark.slow]
IDS = random_prompt(21, 5)


def served(path: Path, log: Path) -> Settings:
    settings = tiny_settings(path, replicas=2, activation_log=str(log))
    return settings.model_copy(update={"server": settings.server.model_copy(update={"debug": True})})


def trainer(path: Path, eps: float | None = None) -> ModelSide:
    model = fresh_model(path, torch.float32)
    if eps is not None:
        model.hf.get_decoder().layers[1].input_layernorm.variance_epsilon = eps
    return ModelSide("trainer", model, training=True)


def asked(address: str, side: ModelSide, record: RolloutRecord) -> Explanation:
    """By the replica that sampled."""
    forward = TrainingForward(side.model)
    with torch.no_grad(), forward.aligned():
        values = forward([training_sample(record)]).logprobs.numpy()
    with ServerSide(address, replica=record.replica or "") as rollout:
        assert rollout.paths == ("fused", "modules")
        vocab = side.model.spec.vocab_size
        return explain(
            rollout, side, Case(record, values), vocab_size=vocab, config=side.config(), thorough=True
        )  # fmt: skip


async def test_an_actor_is_a_side(ray_cluster: Any, tiny_qwen3_path: Path, tmp_path: Path) -> None:
    """One service for all of it, since actors take seconds to start."""
    async with (
        running_service(served(tiny_qwen3_path, tmp_path / "{name}.jsonl")) as service,
        AsyncRolloutClient(service.address, timeout_s=60) as client,
    ):
        results = [client.generate(list(IDS), sampling(max_tokens=8, seed=i), request_id=f"r{i}") for i in range(4)]
        records = records_of(await asyncio.gather(*results))
        assert {r.replica for r in records} == {"replica-0", "replica-1"}, "control: both took part"
        for record in {r.replica: r for r in records}.values():
            sound = await asyncio.to_thread(asked, service.address, trainer(tiny_qwen3_path), record)
            assert sound.cause is Cause.NONE and any(e.stage == "numerics" for e in sound.evidence)
            wrong = await asyncio.to_thread(asked, service.address, trainer(tiny_qwen3_path, 1e-5), record)
            assert wrong.finding.place == "layers.1.input_layernorm" and "eps 1e-05" in wrong.finding.sentence
        stale = trainer(tiny_qwen3_path)
        dict(stale.model.parameters())["model.layers.0.mlp.up_proj.weight"].data.mul_(1.001)
        found = await asyncio.to_thread(asked, service.address, stale, records[0])
        assert (found.cause, found.finding.kind) == (Cause.WEIGHTS, "stale"), "a tensor came through GetTensor"
        await asyncio.to_thread(typed_refusals, service.address)
        again = await replay_records(records, service.address)
        assert [r.equal for r in again] == [True] * 4
        # Replays use pages of their own: all of the engine's are free.
        assert [r.free_pages for r in (await client.info()).replicas] == [
            r.total_pages for r in (await client.info()).replicas
        ]
    logged = {d.sample_id for n in (0, 1) for d in read_activations(tmp_path / f"replica-{n}.jsonl")}
    assert len(logged) == 8, "four samples and their replays, each logged once, by the actor that served it"


def typed_refusals(address: str) -> None:
    """Errors keep their type through the actor: Ray derives classes of its own from ours."""
    with ServerSide(address, replica="replica-1") as rollout:
        assert rollout.tensor("no.such.tensor") is None
        with pytest.raises(InvalidRequest, match="at least one token"):
            rollout.trace(TraceRequest(()))
        trace = rollout.trace(TraceRequest(IDS, logits_from=20, tensors=(LOGITS,)))
        assert trace.tensors[LOGITS].shape == (1, 64) and trace.digests[LOGITS].dtype == np.uint64
    with pytest.raises(NotFound, match="no replica"):
        ServerSide(address, replica="replica-9")
