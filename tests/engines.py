"""Engines on small models for tests: build one, run it dry, and score what it said on the other two paths."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from rollout.certify.threads import torch_threads as torch_threads
from rollout.detokenize import Detokenizer
from rollout.engine import Engine
from rollout.errors import RolloutError
from rollout.events import Event, FailureEvent, ScoreEvent
from rollout.images import ImageInput
from rollout.kernels.registry import resolve_kernels
from rollout.model import SharedModel, load_model
from rollout.scheduler import SchedulerLimits
from rollout.types import (
    Float32Array,
    SampleEvent,
    SampleRequest,
    SampleSummary,
    SamplingParams,
    ScoreSequence,
    SequenceScore,
    UInt64Array,
)
from trainer_bridge.forward import TrainingForward, TrainingSample

MAX_STEPS = 20_000


# ---- building ---------------------------------------------------------------------------------------------------


def fresh_model(path: Path, dtype: torch.dtype, *, page_size: int = 16, **options: Any) -> SharedModel:
    """A model of its own: for tests that change weights."""
    transformers.utils.logging.disable_progress_bar()
    return load_model(path, dtype=dtype, kernels=resolve_kernels(page_size=page_size), **options)


@functools.cache
def shared_model(path: Path, dtype: torch.dtype, page_size: int = 16) -> SharedModel:
    """One model a folder, dtype and page size for the whole session; never to be changed."""
    return fresh_model(path, dtype, page_size=page_size)


def build_engine(
    model: SharedModel,
    *,
    batch_tokens: int = 64,
    running: int = 32,
    waiting: int = 1000,
    chunk: int = 24,
    kv_tokens: int = 4096,
    tokenizer: Detokenizer | None = None,
    shuffle: int | None = None,
    version: int = 0,
    fused: bool = True,
    prefix_cache: bool = True,
) -> Engine:
    """An engine whose KV starts as NaN, so that a read of anything unwritten shows."""
    page = model.kernels.page_size
    limits = SchedulerLimits(batch_tokens, min(running, batch_tokens), waiting, chunk, page)
    engine = Engine(
        model,
        limits,
        kv_cache_tokens=kv_tokens,
        tokenizer=tokenizer,
        weight_version=version,
        fused=fused,
        prefix_cache=prefix_cache,
    )
    engine.store.poison()
    if shuffle is not None:
        engine.pages.shuffle(random.Random(shuffle))
    return engine


def wipe(engine: Engine) -> None:
    """Drop every cached page, then fill the whole KV with NaN: nothing that was computed before can serve again."""
    engine.restart_kv()
    engine.store.poison()


def sample(prompt: Sequence[int], sample_id: str = "s", index: int = 0, **sampling: Any) -> SampleRequest:
    """A request with row digests; 12 tokens and seed 1 unless told."""
    values = {"seed": 1, "max_tokens": 12, "ignore_eos": True} | sampling
    return SampleRequest(sample_id, tuple(int(t) for t in prompt), SamplingParams(**values), index, row_digests=True)


def random_prompt(length: int, seed: int, vocab_size: int = 64) -> tuple[int, ...]:
    """Token ids that neither torch nor the model had a hand in."""
    return tuple(int(t) for t in np.random.default_rng(seed).integers(2, vocab_size, length))


# ---- running ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Generated:
    """Everything an engine said about one sample."""

    token_ids: list[int] = field(default_factory=list)
    policy: list[np.float32] = field(default_factory=list)
    behavior: list[np.float32] = field(default_factory=list)
    digests: list[np.uint64] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    summary: SampleSummary | None = None
    score: SequenceScore | None = None
    error: RolloutError | None = None

    @property
    def ended(self) -> bool:
        return self.summary is not None or self.score is not None or self.error is not None

    def bits(self) -> tuple[object, ...]:
        """Ids, log-probs and digests as comparable bytes."""
        return (
            tuple(self.token_ids),
            np.array(self.policy, np.float32).tobytes(),
            np.array(self.behavior, np.float32).tobytes(),
            np.array(self.digests, np.uint64).tobytes(),
        )


class Record:
    """Collects events by sample and checks that each is told once, in order."""

    def __init__(self) -> None:
        self.samples: dict[str, Generated] = {}

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            one = self.samples.setdefault(event.sample_id, Generated())
            assert not one.ended, f"{event.sample_id} spoke after its end"
            if isinstance(event, ScoreEvent):
                one.score = event.score
            elif isinstance(event, FailureEvent):
                one.error = event.error
            else:
                self._take_sample(one, event)

    @staticmethod
    def _take_sample(one: Generated, event: SampleEvent) -> None:
        chunk = event.chunk
        if chunk is not None:
            assert chunk.offset == len(one.token_ids), f"{event.sample_id}: token lost or repeated at {chunk.offset}"
            assert len(chunk.token_ids) == len(chunk.policy_logprobs) == len(chunk.behavior_logprobs)
            one.token_ids += chunk.token_ids.tolist()
            one.policy += list(chunk.policy_logprobs)
            one.behavior += list(chunk.behavior_logprobs)
            one.versions += [chunk.weight_version] * len(chunk.token_ids)
            one.digests += [] if chunk.row_digests is None else list(chunk.row_digests)
        one.summary = event.summary


def drain(
    engine: Engine,
    record: Record | None = None,
    *,
    between: Callable[[int], None] | None = None,
    steps: int = MAX_STEPS,
) -> Record:
    """Step until nothing is live, or ``steps`` were taken; page accounting is checked after every step.

    Args:
        between: called with the number of steps taken so far, before each step.
    """
    record = record if record is not None else Record()
    with engine.model.kernels.invariant_mode():
        for taken in range(steps):
            if between is not None:
                between(taken)
            if not engine.live_ids:
                break
            record.take(engine.step())
            engine.scheduler.check()
    if steps == MAX_STEPS:
        assert not engine.live_ids, f"{len(engine.live_ids)} samples are still live after {steps} steps"
    if not engine.live_ids:
        assert engine.pages.num_free == engine.pages.num_pages, "pages are missing after a drain"
    return record


def run(engine: Engine, requests: Sequence[SampleRequest]) -> dict[str, Generated]:
    """Add all, run dry."""
    for request in requests:
        engine.add(engine.effective_request(request))
    return drain(engine).samples


def isolated(model: SharedModel, request: SampleRequest, **options: Any) -> Generated:
    """The sample in an engine of its own."""
    return run(build_engine(model, **options), [request])[request.sample_id]


# ---- the other two paths ----------------------------------------------------------------------------------------


def rescore(
    engine: Engine,
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    temperatures: Sequence[float],
    images: Sequence[tuple[ImageInput, ...]] | None = None,
) -> list[SequenceScore]:
    """``Score`` of whole sequences, all at once."""
    pictures = images if images is not None else [()] * len(sequences)
    for i, (ids, start, temperature) in enumerate(zip(sequences, starts, temperatures, strict=True)):
        score = ScoreSequence(tuple(ids), start, pictures[i])
        engine.add_score(f"score{i}", score, temperature=temperature, want_digests=True)
    samples = drain(engine).samples
    scores = [samples[f"score{i}"].score for i in range(len(sequences))]
    return [s for s in scores if s is not None]


@torch.no_grad()
def train_forward(
    model: SharedModel, samples: Sequence[TrainingSample], *, micro_batch: int | None = None, aligned: bool = True
) -> list[tuple[Float32Array, UInt64Array]]:
    """Log-probs and digests of the training forward, per sample; ``aligned=False`` leaves the invariant mode out."""
    forward = TrainingForward(model)
    size = micro_batch or len(samples)
    results: list[tuple[Float32Array, UInt64Array]] = []
    with forward.aligned() if aligned else contextlib.nullcontext():
        for start in range(0, len(samples), size):
            out = forward(samples[start : start + size], digests=True)
            for logprobs, digests in zip(out.split(), out.split_digests(), strict=True):
                assert digests is not None
                results.append((logprobs.numpy(), digests))
    return results


def training_sample(request: SampleRequest, generated: Generated) -> TrainingSample:
    ids = np.array(request.prompt_ids, np.int32), np.array(generated.token_ids, np.int32)
    return TrainingSample(*ids, request.sampling.temperature, request.images)


def unequal(a: npt.ArrayLike, b: npt.ArrayLike) -> int:
    """How many float32 entries differ in bits."""
    left, right = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert left.shape == right.shape, f"{left.shape} against {right.shape}"
    return int(np.count_nonzero(left.view(np.uint32) != right.view(np.uint32)))


def assert_three_ways_equal(
    model: SharedModel, requests: Sequence[SampleRequest], generated: dict[str, Generated], engine: Engine
) -> int:
    """Decode = Score = training forward, log-probs and row digests; returns the number of tokens compared."""
    ordered = [generated[r.sample_id] for r in requests]
    whole = [[*r.prompt_ids, *g.token_ids] for r, g in zip(requests, ordered, strict=True)]
    starts = [len(r.prompt_ids) for r in requests]
    temperatures = [r.sampling.temperature for r in requests]
    scores = rescore(engine, whole, starts, temperatures, [r.images for r in requests])
    trained = train_forward(model, [training_sample(r, g) for r, g in zip(requests, ordered, strict=True)])
    for request, one, score, (logprobs, digests) in zip(requests, ordered, scores, trained, strict=True):
        where = f"{request.sample_id} (prompt {len(request.prompt_ids)})"
        assert unequal(one.policy, score.logprobs) == 0, f"{where}: decode differs from Score"
        assert unequal(one.policy, logprobs) == 0, f"{where}: decode differs from the training forward"
        assert score.row_digests is not None
        assert one.digests == score.row_digests.tolist() == digests.tolist(), f"{where}: row digests differ"
    return sum(len(g.token_ids) for g in ordered)
