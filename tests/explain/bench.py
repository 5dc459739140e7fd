"""A rollout and a trainer on one model, for planting faults: records from the engine, log-probs from the trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rollout.attention import PackedStep
from rollout.engine import Engine
from rollout.kernels.base import Decoder
from rollout.logprobs import policy_logprobs
from rollout.model import SharedModel
from rollout.types import Float32Array, SamplingParams
from tests.engines import build_engine, fresh_model, random_prompt, run, sample, shared_model
from trainer_bridge.explain.case import Case, FedInputs
from trainer_bridge.explain.findings import Cause, Explanation
from trainer_bridge.explain.run import explain
from trainer_bridge.explain.sides import ModelSide
from trainer_bridge.rollout_record import RolloutRecord

PROMPT, TOKENS, TEMPERATURE = 21, 12, 0.7
PAGE = {"smollm2": 128}


@functools.cache
def clean_engine(path: Path, dtype: torch.dtype, page: int) -> Engine:
    """One engine a model for the whole suite; starting one measures its products."""
    model = shared_model(path, dtype, page)
    return build_engine(model, kv_tokens=16 * page if page > 16 else 2048, batch_tokens=64, chunk=24)


@dataclass(slots=True)
class Bench:
    """One clean pair of sides, to be spoiled by a fault."""

    path: Path
    dtype: torch.dtype
    page: int = 16
    rollout: SharedModel = field(init=False)
    trainer: SharedModel = field(init=False)
    decoder: Decoder | None = field(init=False)
    engine: Callable[[RolloutRecord], RolloutRecord] | None = None
    """generates a record once more on the rollout's own caches"""

    def __post_init__(self) -> None:
        self.rollout = shared_model(self.path, self.dtype, self.page)
        self.trainer = fresh_model(self.path, self.dtype, page_size=self.page)
        self.decoder = clean_engine(self.path, self.dtype, self.page)._decoder

    @property
    def vocab(self) -> int:
        return self.rollout.spec.vocab_size

    # ---- the rollout ----------------------------------------------------------------------------------------

    def record(
        self, prompt: Sequence[int] | None = None, *, engine: Engine | None = None, **sampling: object
    ) -> RolloutRecord:
        """Generate one sample."""
        ids = tuple(prompt) if prompt is not None else random_prompt(PROMPT, 5, self.vocab)
        values = {"temperature": TEMPERATURE, "max_tokens": TOKENS} | sampling
        request = sample(ids, **values)
        one = run(engine or clean_engine(self.path, self.dtype, self.page), [request])[request.sample_id]
        assert one.summary is not None
        return RolloutRecord(
            request_id="r",
            sample_index=0,
            prompt_ids=np.array(ids, np.int32),
            token_ids=np.array(one.token_ids, np.int32),
            policy_logprobs=np.array(one.policy, np.float32),
            behavior_logprobs=np.array(one.behavior, np.float32),
            mask=np.ones(len(one.token_ids), np.bool_),
            finish=one.summary.finish.reason,
            seed=1,
            sampling=request.sampling,
            mode=request.sampling.logprob_mode,
            row_digests=np.array(one.digests, np.uint64),
        )

    def spoiled_engine(self) -> Engine:
        """An engine that runs the modules of ``self.rollout``, so that what is planted in them counts."""
        self.decoder = None
        return build_engine(self.rollout, kv_tokens=2048, fused=False)

    def own_rollout(self) -> SharedModel:
        """Give the rollout a model of its own, to be spoiled."""
        self.rollout = fresh_model(self.path, self.dtype, page_size=self.page)
        return self.rollout

    # ---- the trainer ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(
        self, ids: Sequence[int], positions: Sequence[int] | None = None, company: Sequence[Sequence[int]] = ()
    ) -> torch.Tensor:
        """The trainer's forward over one packed sequence, with others before it: [S, >= V]."""
        parts = [torch.tensor(list(c)) for c in (*company, ids)]
        places = [torch.arange(len(p)) for p in parts]
        if positions is not None:
            places[-1] = torch.tensor(list(positions))
        cu = torch.tensor([0, *(len(p) for p in parts)]).cumsum(0).to(torch.int32)
        with self.trainer.kernels.invariant_mode():
            step = PackedStep(self.trainer.kernels, cu)
            hidden = self.trainer.hidden_states(torch.cat(parts), torch.cat(places), step)
            return self.trainer.logits(hidden[int(cu[-2]) :])

    def rows(self, record: RolloutRecord, **feed: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits [L, >= V], targets [L], temperatures [L]) of a record."""
        ids = [*record.prompt_ids.tolist(), *record.token_ids.tolist()][:-1]
        logits = self.logits(ids, **feed)[-len(record.token_ids) :]  # type: ignore[arg-type]
        assert record.sampling is not None
        value = record.sampling.temperature or 1.0
        return logits, torch.tensor(record.token_ids.tolist()), torch.full((len(logits),), value)

    def score(self, record: RolloutRecord, **feed: object) -> Float32Array:
        """The trainer's log-probs."""
        logits, targets, temperatures = self.rows(record, **feed)
        values: Float32Array = policy_logprobs(logits, targets, temperatures, self.vocab).numpy()
        return values

    def case(self, record: RolloutRecord | None = None, values: Float32Array | None = None, **fields: object) -> Case:
        """A case of this bench; the trainer's values are computed unless given."""
        record = record if record is not None else self.record()
        return Case(record, values if values is not None else self.score(record), **fields)  # type: ignore[arg-type]

    def explain(self, case: Case, *, thorough: bool = False) -> Explanation:
        """Ask."""
        left = ModelSide("rollout", self.rollout, training=False, decoder=self.decoder, engine=self.engine)
        right = ModelSide("trainer", self.trainer, training=True)
        config = self.rollout.hf.config.to_dict()
        return explain(left, right, case, vocab_size=self.vocab, config=config, thorough=thorough)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to plant and what must be said about it."""

    name: str
    cause: Cause
    place: str
    """regular expression that the place must match"""
    kind: str
    """regular expression that the kind must match"""
    model: str
    """qwen3-fp32, llama-bf16, ..."""
    plant: Callable[[Bench], Case]
    words: str = ""
    """regular expression that the sentence must hold"""
    aligned: bool = True
    """whether it is planted in invariant mode"""


FAULTS: list[Fault] = []


def fault(
    name: str,
    cause: Cause,
    place: str,
    kind: str,
    model: str = "qwen3-fp32",
    words: str = "",
    *,
    aligned: bool = True,
) -> Callable[[Callable[[Bench], Case]], Callable[[Bench], Case]]:
    """Enter a planting function into the suite."""

    def enter(plant: Callable[[Bench], Case]) -> Callable[[Bench], Case]:
        FAULTS.append(Fault(name, cause, place, kind, model, plant, words, aligned))
        return plant

    return enter


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """These models are too small for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fed(record: RolloutRecord, **fields: object) -> FedInputs:
    """What a trainer that fed the record rightly would have written down."""
    ids = np.concatenate((record.prompt_ids, record.token_ids))
    values = {"token_ids": ids, "positions": np.arange(len(ids), dtype=np.int32)} | fields
    return FedInputs(**values)  # type: ignore[arg-type]


def with_sampling(record: RolloutRecord, **fields: object) -> RolloutRecord:
    """The record with other sampling parameters."""
    assert record.sampling is not None
    sampling: SamplingParams = dataclasses.replace(record.sampling, **fields)  # type: ignore[arg-type]
    return dataclasses.replace(record, sampling=sampling)
