"""A running service as a side: the same taps as in process, off unless asked for; and digests it logged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.activation_log import read_activations
from rollout.config import Settings
from rollout.errors import InvalidRequest, NotFound, UnsupportedFeature
from rollout.serving import running_service
from rollout.taps import LOGITS, TraceRequest
from tests.engines import fresh_model, random_prompt
from tests.services import sampling, tiny_settings
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.collect import records_of, training_sample
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause, Explanation
from trainer_bridge.explain.recorded import localise_recorded, recording
from trainer_bridge.explain.run import explain
from trainer_bridge.explain.server_side import ServerSide
from trainer_bridge.explain.sides import ModelSide
from trainer_bridge.forward import TrainingForward
from trainer_bridge.rollout_record import RolloutRecord

IDS = random_prompt(21, 5)


def served(path: Path, *, debug: bool, log: Path | None = None) -> Settings:
    settings = tiny_settings(path, activation_log=None if log is None else str(log))
    return settings.model_copy(update={"server": settings.server.model_copy(update={"debug": debug})})


async def sampled(client: AsyncRolloutClient) -> RolloutRecord:
    return records_of([await client.generate(list(IDS), sampling(max_tokens=8), request_id="r")])[0]


def side(path: Path, eps: float | None = None) -> ModelSide:
    model = fresh_model(path, torch.float32)
    if eps is not None:
        model.hf.get_decoder().layers[1].input_layernorm.variance_epsilon = eps
    return ModelSide("trainer", model, training=True)


def score(trainer: ModelSide, record: RolloutRecord) -> np.ndarray:
    forward = TrainingForward(trainer.model)
    with torch.no_grad(), forward.aligned():
        return forward([training_sample(record)]).logprobs.numpy()


def asked(address: str, trainer: ModelSide, record: RolloutRecord) -> Explanation:
    with ServerSide(address) as rollout:
        assert rollout.paths == ("fused", "modules")
        case = Case(record, score(trainer, record))
        spec = trainer.model.spec
        return explain(rollout, trainer, case, vocab_size=spec.vocab_size, config=trainer.config(), thorough=True)


async def test_a_server_is_a_side(tiny_qwen3_path: Path) -> None:
    """Equal where it is sound; a fault of the trainer found through the taps, a stale tensor through digests."""
    async with (
        running_service(served(tiny_qwen3_path, debug=True), in_process=True) as service,
        AsyncRolloutClient(service.address) as client,
    ):
        record = await sampled(client)
        sound = await asyncio.to_thread(asked, service.address, side(tiny_qwen3_path), record)
        assert sound.cause is Cause.NONE
        wrong = await asyncio.to_thread(asked, service.address, side(tiny_qwen3_path, 1e-5), record)
        assert wrong.finding.place == "layers.1.input_layernorm" and "eps 1e-05" in wrong.finding.sentence
        stale = side(tiny_qwen3_path)
        dict(stale.model.parameters())["model.layers.0.mlp.up_proj.weight"].data.mul_(1.001)
        found = await asyncio.to_thread(asked, service.address, stale, record)
        assert (found.cause, found.finding.kind) == (Cause.WEIGHTS, "stale")
        await asyncio.to_thread(refusals, service.address)


def refusals(address: str) -> None:
    with ServerSide(address) as rollout:
        assert rollout.tensor("no.such.tensor") is None
        with pytest.raises(InvalidRequest, match="at least one token"):
            rollout.trace(TraceRequest(()))
    with ServerSide(address, replica="replica-0") as rollout:
        trace = rollout.trace(TraceRequest(IDS, logits_from=20, tensors=(LOGITS,)))
        assert trace.tensors[LOGITS].shape == (1, 64) and trace.tensors[LOGITS].dtype == torch.float32
    with pytest.raises(NotFound, match="no replica"):
        ServerSide(address, replica="replica-9")


async def test_taps_are_off_unless_asked_for(tiny_qwen3_path: Path) -> None:
    async with running_service(served(tiny_qwen3_path, debug=False), in_process=True) as service:
        with pytest.raises(UnsupportedFeature, match=r"server\.debug=true"):
            await asyncio.to_thread(ServerSide, service.address)


@pytest.mark.parametrize("fault", [None, "eps", "position"])
async def test_recorded_digests(tiny_qwen3_path: Path, tmp_path: Path, fault: str | None) -> None:
    """Both sides record in passing; nothing is replayed, and the layer is named."""
    log = tmp_path / "{name}.jsonl"
    async with (
        running_service(served(tiny_qwen3_path, debug=False, log=log), in_process=True) as service,
        AsyncRolloutClient(service.address) as client,
    ):
        record = await sampled(client)
    (ours,) = read_activations(tmp_path / "replica-0.jsonl")
    assert ours.token_ids == (*IDS, *record.token_ids.tolist())[: len(ours.token_ids)]
    assert len(ours.token_ids) == len(IDS) + 7
    trainer = side(tiny_qwen3_path, 1e-5 if fault == "eps" else None)
    forward = TrainingForward(trainer.model)
    kept = trainer.model.kernels
    samples = [training_sample(record)]
    if fault == "position":
        rotary = trainer.model.hf.get_decoder().rotary_emb
        plain = rotary.forward
        rotary.forward = lambda x, positions: plain(x, positions + 1)
    with torch.no_grad(), forward.aligned(), recording(forward) as recorded:
        forward(samples)
    assert trainer.model.kernels is kept
    fed = [*IDS, *record.token_ids.tolist()]
    (theirs,) = recorded.digests(["r"], [fed])
    finding = localise_recorded(ours, theirs)
    expected = {None: "", "eps": "layers.1.keys", "position": "layers.0.keys"}[fault]
    assert finding.place == expected
    assert finding.cause is (Cause.NONE if fault is None else Cause.NUMERICS)
