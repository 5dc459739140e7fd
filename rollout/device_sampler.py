"""Sampling for kernel sets whose log-softmax is the device's own: C1 is computed there, once, as the trainer computes
it.

The host's sampler draws from those log-probs; what it computes from them again decides the draw only, never a value
that is reported.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from rollout.batch import OutputRow
from rollout.logprobs import policy_logprob_rows
from rollout.token_sampler import SampledToken, TokenSampler

_SLICE = 64
"""Rows of log-probs held at once."""


class DeviceTokenSampler:
    """``TokenSampler``'s interface over log-prob rows of the device."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._host = TokenSampler(vocab_size)

    def run(self, logits: torch.Tensor, outputs: tuple[OutputRow, ...]) -> list[SampledToken]:
        """logits [N, >= V] on the device -> one SampledToken per row."""
        result: list[SampledToken] = []
        for start in range(0, len(outputs), _SLICE):
            result += self._slice(logits[start : start + _SLICE], outputs[start : start + _SLICE])
        return result

    def _slice(self, logits: torch.Tensor, outputs: tuple[OutputRow, ...]) -> list[SampledToken]:
        temperatures = torch.tensor([o.sequence.temperature for o in outputs], dtype=torch.float32)
        rows = policy_logprob_rows(logits, temperatures, self._vocab_size).cpu()
        # T has divided the logits already.
        unit = tuple(dataclasses.replace(o, sequence=dataclasses.replace(o.sequence, temperature=1.0)) for o in outputs)
        values = rows.numpy()
        return [_reported(t, values[i]) for i, t in enumerate(self._host.run(rows, unit))]


def _reported(token: SampledToken, row: np.ndarray) -> SampledToken:
    if token.error is not None or token.token_id < 0:
        return token
    policy = np.float32(row[token.token_id])
    kept = token.behavior_logprob - token.policy_logprob
    behavior = policy if kept == 0 else np.float32(policy + kept)
    return dataclasses.replace(token, policy_logprob=policy, behavior_logprob=behavior)
