"""Sampling for kernel sets whose log-softmax is the device's own: C1 is computed there, once, as the trainer computes
it.

The host's sampler draws from those log-probs; what it computes from them again decides the draw only, never a value
that is reported. Filtered rows are cut, drawn and reported by C2's own definition on those log-probs.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from rollout.batch import OutputRow
from rollout.kernels.cpu.sampler import CpuSampler
from rollout.logprobs import policy_logprob_rows
from rollout.sampling import behavior_logprob, kept_tokens
from rollout.token_sampler import SampledToken, TokenSampler
from rollout.types import Float32Array

_SLICE = 64
"""Rows of log-probs held at once."""


class DeviceTokenSampler:
    """``TokenSampler``'s interface over log-prob rows of the device."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._host = TokenSampler(vocab_size)
        self._draws = CpuSampler()

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
        return [self._reported(token, values[i], outputs[i]) for i, token in enumerate(self._host.run(rows, unit))]

    def _reported(self, token: SampledToken, row: Float32Array, output: OutputRow) -> SampledToken:
        """With the device's own values: what the host made of them again is off by a rounding."""
        if token.error is not None or token.token_id < 0:
            return token
        request = output.sequence.request
        if request is None or output.given or not request.sampling.filtered:
            policy = np.float32(row[token.token_id])
            return dataclasses.replace(token, policy_logprob=policy, behavior_logprob=policy)
        keep = kept_tokens(row, request.sampling, output.sequence.barred)
        if request.sampling.greedy:
            chosen = int(np.where(keep, row, -np.inf).argmax())
        else:
            chosen = self._draws.draw(row, keep, output.sequence.seed, output.position)
        policy = np.float32(row[chosen])
        return SampledToken(chosen, policy, behavior_logprob(policy, row, keep))
