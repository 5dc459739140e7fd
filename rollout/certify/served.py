"""The sampler that serving runs, called with rows of our own: tokens and both log-probs as a response holds them."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
import torch

from rollout.batch import OutputRow
from rollout.certify.subject import Subject
from rollout.device_sampler import DeviceTokenSampler
from rollout.logprobs import effective_temperature
from rollout.sequence import Sequence
from rollout.token_sampler import TokenSampler
from rollout.types import SampleRequest, SamplingParams

_PROMPT = 5
"""Tokens before the one that is wanted; any number will do."""
POSITION = _PROMPT - 1
"""Position of every row: index of the last token fed."""


@dataclass(frozen=True, slots=True)
class Served:
    """N rows, as answered."""

    tokens: torch.Tensor
    """int64 [N]"""
    policy: torch.Tensor
    """float32 [N]"""
    behavior: torch.Tensor
    """float32 [N]"""

    def rows(self, first: int, last: int) -> Served:
        """Some of them."""
        return Served(self.tokens[first:last], self.policy[first:last], self.behavior[first:last])


def given_row(token: int, temperature: float) -> OutputRow:
    """A row whose token is known, as Score asks."""
    ids = [0] * _PROMPT + [token]
    value = effective_temperature(temperature)
    return OutputRow(Sequence("given", ids, _PROMPT, len(ids), temperature=value), POSITION)


def drawn_row(params: SamplingParams, seed: int) -> OutputRow:
    """A row whose token is to be drawn, as Generate asks; ``seed``: unsigned 64-bit."""
    ids = [0] * _PROMPT
    request = SampleRequest("drawn", tuple(ids), params)
    sequence = Sequence(
        "drawn",
        ids,
        _PROMPT,
        _PROMPT + 1,
        request=request,
        temperature=effective_temperature(params.temperature),
        seed=seed,
        barred=np.array(params.barred_token_ids, np.int64),
    )
    return OutputRow(sequence, POSITION)


def serve(subject: Subject, logits: torch.Tensor, rows: Several[OutputRow]) -> Served:
    """logits [N, >= V] through the engine's own sampler. Call in invariant mode."""
    kind = DeviceTokenSampler if subject.kernels.device_logprobs else TokenSampler
    found = kind(subject.spec.vocab_size).run(logits, tuple(rows))
    return Served(
        torch.tensor([one.token_id for one in found], dtype=torch.int64),
        torch.from_numpy(np.array([one.policy_logprob for one in found], np.float32)),
        torch.from_numpy(np.array([one.behavior_logprob for one in found], np.float32)),
    )
