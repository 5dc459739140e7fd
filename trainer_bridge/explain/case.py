"""What is to be explained: one sample as both sides recorded it, and what the trainer fed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.errors import InvalidRequest
from rollout.logprobs import effective_temperature
from rollout.types import Float32Array, Int32Array
from trainer_bridge.checks import Mask
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.ulp import bits


@dataclass(frozen=True, slots=True)
class FedInputs:
    """What the trainer's forward was given for this sample, pads removed; None: not recorded."""

    token_ids: Int32Array | None = None
    """[S]"""
    positions: Int32Array | None = None
    """[S]"""
    temperature: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One mismatching sample. L: its generated tokens."""

    record: RolloutRecord
    trainer_logprobs: Float32Array
    """[L'] nats; NaN or 0.0 where the trainer has none"""
    trainer_mask: Mask | None = None
    """[L'] tokens that enter the trainer's loss; None: not recorded"""
    fed: FedInputs = FedInputs()
    trainer_company: tuple[tuple[int, ...], ...] = ()
    """other sequences of the trainer's micro-batch, where known"""
    rollout_company: tuple[tuple[int, ...], ...] = ()
    """sequences that were in the rollout's batch, where known"""

    @property
    def prompt(self) -> tuple[int, ...]:
        """[P]"""
        return tuple(int(t) for t in self.record.prompt_ids)

    @property
    def generated(self) -> tuple[int, ...]:
        """[L]"""
        return tuple(int(t) for t in self.record.token_ids)

    @property
    def fed_ids(self) -> tuple[int, ...]:
        """[P + L - 1]: the last generated token is scored, never fed."""
        return (*self.prompt, *self.generated)[:-1]

    @property
    def start(self) -> int:
        """Row whose logits score the first generated token."""
        return len(self.prompt) - 1

    @property
    def temperature(self) -> float:
        """As sampled; 0 is greedy.

        Raises:
            InvalidRequest: the record does not say.
        """
        sampling = self.record.sampling
        found = sampling.temperature if sampling is not None else self.record.temperature
        if found is None:
            raise InvalidRequest(
                "the record has no temperature; log-probs mean nothing without it", field="temperature"
            )
        return found

    @property
    def divisor(self) -> float:
        """float32 value that divides the logits."""
        return effective_temperature(self.temperature)

    @property
    def first_mismatch(self) -> int | None:
        """First token with mask 1 on the rollout's side whose bits differ; None: all equal."""
        length = min(len(self.generated), len(self.trainer_logprobs))
        differ = self.record.mask[:length] & (
            bits(self.record.policy_logprobs[:length]) != bits(self.trainer_logprobs[:length])
        )
        if differ.any():
            return int(np.argmax(differ))
        return None if len(self.generated) == len(self.trainer_logprobs) else length
