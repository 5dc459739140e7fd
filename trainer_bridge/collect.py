"""From what the client received to records, samples to train on, and one digest over everything sampled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from trainer_bridge.forward import TrainingSample
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.wire import GenerateResult


def records_of(results: Iterable[GenerateResult]) -> list[RolloutRecord]:
    """One record per sample, in the order of requests and samples."""
    return [
        RolloutRecord(
            request_id=result.request_id,
            sample_index=sample.sample_index,
            prompt_ids=np.array(result.prompt_ids, np.int32),
            token_ids=sample.token_ids,
            policy_logprobs=sample.policy_logprobs,
            mask=sample.mask.astype(np.bool_),
            finish=sample.finish.reason,
            seed=result.sampling.seed,
            sampling=result.sampling,
            mode=result.mode,
            spans=sample.spans,
            behavior_logprobs=sample.behavior_logprobs,
            row_digests=sample.row_digests,
            replica=sample.replica,
            weight_version=sample.spans[-1].version if sample.spans else None,
            manifest_digest=result.manifest_digest,
            top=sample.top,
            prompt_score=result.prompt,
        )
        for result in results
        for sample in result.samples
    ]


def training_sample(record: RolloutRecord) -> TrainingSample:
    """What the training forward needs of a record."""
    temperature = record.sampling.temperature if record.sampling is not None else record.temperature
    return TrainingSample(record.prompt_ids, record.token_ids, 1.0 if temperature is None else temperature)


class TokenDigest:
    """SHA-256 over every sampled id and log-prob in the order given: equal exactly when two runs sampled equal bits."""

    def __init__(self) -> None:
        self._state = hashlib.sha256()
        self.tokens = 0

    def add(self, records: Sequence[RolloutRecord]) -> None:
        """Fold in a step's records, in the order of requests and samples."""
        for record in records:
            self._state.update(len(record.token_ids).to_bytes(8, "little"))
            self._state.update(record.token_ids.astype("<i4").tobytes())
            self._state.update(record.policy_logprobs.astype("<f4").tobytes())
            self.tokens += len(record.token_ids)

    @property
    def hex(self) -> str:
        """The digest of everything folded in so far; more may follow."""
        return self._state.hexdigest()
