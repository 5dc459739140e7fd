"""One-off generation and comparison, behind ``zerodrift generate`` and ``zerodrift compare``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import torch

from rollout.assets import prepare_model
from rollout.config import Settings
from rollout.errors import InvalidRequest
from rollout.kernels.registry import kernels_of
from rollout.model import DTYPES, load_model
from rollout.types import SamplingParams
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.collect import records_of, training_sample
from trainer_bridge.compare import compare as compare_samples
from trainer_bridge.forward import TrainingForward
from trainer_bridge.jsonl import read_rollouts
from trainer_bridge.records import Comparison, ScoredSample
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.wire.channel import ClientSecurity

Prompt = str | tuple[int, ...]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file, one object a line with ``prompt`` (text) or ``prompt_ids``.

    Raises:
        InvalidRequest: naming the line.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            item = json.loads(line)
            prompts.append(item["prompt"] if "prompt" in item else tuple(int(i) for i in item["prompt_ids"]))
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest(
                f'{path}, line {number}: expected {{"prompt": text}} or {{"prompt_ids": [...]}}'
            ) from None
    return prompts


@contextlib.asynccontextmanager
async def service_address(address: str | None, settings: Settings) -> AsyncIterator[str]:
    """``address`` itself, or that of a service in this process for as long as the block lasts."""
    if address is not None:
        yield address
        return
    from rollout.serving import running_service

    async with running_service(settings, in_process=True) as service:
        yield service.address


async def generate_rollouts(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    n: int,
    digests: bool,
    priority: int = 0,
    address: str | None,
    settings: Settings,
) -> list[tuple[RolloutRecord, str]]:
    """Sample every prompt; prompt i gets seed + i when a seed is given. Returns records and their text."""
    if not prompts:
        raise InvalidRequest("no prompts: give --prompt or --prompts", field="prompt")
    import asyncio
    import dataclasses

    security = ClientSecurity.towards(address, settings.server)
    async with service_address(address, settings) as where, AsyncRolloutClient(where, security=security) as client:
        calls = [
            client.generate(
                prompt,
                dataclasses.replace(sampling, seed=None if sampling.seed is None else sampling.seed + i),
                n=n,
                request_id=f"prompt{i}",
                row_digests=digests,
                priority=priority,
            )
            for i, prompt in enumerate(prompts)
        ]
        results = await asyncio.gather(*calls)
    texts = [s.text or "" for r in results for s in r.samples]
    return list(zip(records_of(results), texts, strict=True))


@torch.no_grad()
def compare_rollouts(path: Path, settings: Settings, *, micro_batch: int) -> Comparison:
    """Score every record of a file with the training forward of the configured model, and compare."""
    records = [r for r in read_rollouts(path) if len(r.token_ids)]
    kernels = kernels_of(settings)
    model = load_model(prepare_model(settings.model.path), dtype=DTYPES[settings.model.dtype], kernels=kernels)
    forward = TrainingForward(model)
    scored: list[ScoredSample] = []
    with forward.aligned():
        for start in range(0, len(records), micro_batch):
            part = records[start : start + micro_batch]
            wants = any(r.row_digests is not None for r in part)
            out = forward([training_sample(r) for r in part], digests=wants)
            for record, logprobs, hashed in zip(part, out.split(), out.split_digests(), strict=True):
                scored.append(
                    record.scored(
                        logprobs.cpu().numpy(), trainer_digests=hashed if record.row_digests is not None else None
                    )
                )  # fmt: skip
    return compare_samples(scored)
