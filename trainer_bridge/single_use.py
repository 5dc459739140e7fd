"""One-off generation and comparison, behind ``zerodrift generate`` and ``zerodrift compare``."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from rollout.assets import prepare_model
from rollout.config import Settings
from rollout.errors import InvalidRequest
from rollout.kernels.registry import kernels_of
from rollout.model import DTYPES, load_model
from rollout.strict_json import strict_loads
from rollout.types import LogprobMode, SamplingParams
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.checks import label
from trainer_bridge.collect import records_of, training_sample
from trainer_bridge.compare import compare as compare_samples
from trainer_bridge.forward import TrainingForward, check_samples
from trainer_bridge.kept_rows import KeptRow, keep_rows
from trainer_bridge.records import Comparison, ScoredSample
from trainer_bridge.rollout_files import read_records
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.room import gather_in_room
from trainer_bridge.wire import GenerateResult
from trainer_bridge.wire.channel import ClientSecurity

Prompt = str | tuple[int, ...]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file, one object a line with ``prompt`` (text) or ``prompt_ids``.

    Raises:
        InvalidRequest: naming the line.
    """
    prompts: list[Prompt] = []
    # Not splitlines: it also parts at U+2028 and others, which a JSON string may hold as they are.
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines if lines != [b""] else [], 1):
        try:
            prompts.append(_prompt(strict_loads(line.decode("utf-8"))))
        except ValueError as error:
            raise InvalidRequest(
                f'{path}, line {number}: expected {{"prompt": text}} or {{"prompt_ids": [...]}} and nothing else, ids '
                f"as integers{f': {error}' if str(error) else ''}"
            ) from None
    return prompts


def _prompt(item: object) -> Prompt:
    match item:
        case {"prompt": str(text), **rest} if not rest:
            return text
        # A string of digits is no list, and 3.0 and true are no ids.
        case {"prompt_ids": [*ids], **rest} if not rest and all(type(i) is int for i in ids):
            return tuple(ids)
    raise ValueError


def _later_seed(seed: int, i: int) -> int:
    """Seed of prompt i. Seeds count modulo 2**64, so the one after the last is the first."""
    later = seed + i
    return later - 2**64 if later >= 2**64 else later


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
    security = ClientSecurity.towards(address, settings.server)
    async with service_address(address, settings) as where, AsyncRolloutClient(where, security=security) as client:
        # Others use the service too, and may have called their first prompt the same.
        unique = secrets.token_hex(8)

        async def one(i: int) -> GenerateResult:
            seed = None if sampling.seed is None else _later_seed(sampling.seed, i)
            name = f"prompt{i}"
            try:
                result = await client.generate(
                    prompts[i],
                    replace(sampling, seed=seed),
                    n=n,
                    request_id=f"{name}-{unique}",
                    row_digests=digests,
                    priority=priority,
                )
            except InvalidRequest as error:
                if not error.field.startswith(("prompt", "text")):
                    raise
                where = f"{name}, number {i + 1} of {len(prompts)}"
                raise InvalidRequest(f"{where}: {error.message}", field=error.field) from error
            return replace(result, request_id=name)

        results = await gather_in_room([partial(one, i) for i in range(len(prompts))], samples_each=n)
    texts = [s.text or "" for r in results for s in r.samples]
    return list(zip(records_of(results), texts, strict=True))


@dataclass(frozen=True, slots=True)
class ScoredFile:
    """A file of rollouts and what the training forward says of it."""

    samples: list[ScoredSample]
    kept_rows: list[KeptRow]
    """the trainer's whole logits rows at the first positions whose digests differ"""

    @property
    def comparison(self) -> Comparison:
        """Both sides, by bits."""
        return compare_samples(self.samples)


@torch.no_grad()
def score_rollouts(
    path: Path, settings: Settings, *, micro_batch: int, policy_logprobs: bool = False, keep: int = 0
) -> ScoredFile:
    """Score every record of a file with the training forward of the configured model.

    Args:
        path: JSON Lines or Parquet, ours or another engine's.
        settings: model and kernels.
        micro_batch: sequences a forward; changes no bit.
        policy_logprobs: the caller's word that records without a mode hold C1's policy log-probs: the whole vocabulary,
            tempered, and at temperature 0 those of temperature 1.
        keep: how many rows to keep where digests differ.

    Raises:
        ParityError: a record without a mode, and no such word.
    """
    records = [r for r in read_records(path) if len(r.token_ids)]
    if policy_logprobs:
        records = [labelled(r) for r in records]
    kernels = kernels_of(settings)
    model = load_model(prepare_model(settings.model.path), dtype=DTYPES[settings.model.dtype], kernels=kernels)
    forward = TrainingForward(model)
    # All at once, by the file's names: before the work, and not by numbers within a micro-batch.
    names = [label(r.request_id, r.sample_index) for r in records]
    check_samples([training_sample(r) for r in records], model.spec, names)
    scored: list[ScoredSample] = []
    with forward.aligned():
        for start in range(0, len(records), micro_batch):
            part = records[start : start + micro_batch]
            wants = any(r.row_digests is not None for r in part)
            out = forward([training_sample(r) for r in part], digests=wants)
            for record, logprobs, hashed in zip(part, out.split(), out.split_digests(), strict=True):
                digests = hashed if record.row_digests is not None else None
                scored.append(record.scored(logprobs.cpu().numpy(), trainer_digests=digests))
        return ScoredFile(scored, keep_rows(forward, scored, limit=keep) if keep else [])


def labelled(record: RolloutRecord) -> RolloutRecord:
    """The record, with C1's mode for its temperature where it names none."""
    if record.mode is not None or record.temperature is None:
        return record
    return replace(record, mode=LogprobMode.GREEDY_T1 if record.temperature == 0.0 else LogprobMode.TEMPERED)


def compare_rollouts(path: Path, settings: Settings, *, micro_batch: int) -> Comparison:
    """``score_rollouts``, compared by bits."""
    return score_rollouts(path, settings, micro_batch=micro_batch).comparison
