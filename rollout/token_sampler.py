"""From logits rows to tokens and log-probs: C1 and C2 applied row by row, the same path for every row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollout.batch import OutputRow
from rollout.errors import InvalidRequest, ParityError, RolloutError
from rollout.kernels.cpu.sampler import (
    DRAW,
    FILTERED,
    GIVEN,
    GREEDY,
    NOTHING_LEFT,
    CpuSampler,
    RowsToSample,
)
from rollout.sampling import MASK32, row_state


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Outcome of one row: a drawn token, or for a scored row the given one."""

    token_id: int
    policy_logprob: np.float32
    behavior_logprob: np.float32
    error: RolloutError | None = None


class TokenSampler:
    """Stateless but for scratch."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sampler = CpuSampler()

    def run(self, logits: torch.Tensor, outputs: tuple[OutputRow, ...]) -> list[SampledToken]:
        """logits [N, >= V] -> one SampledToken per row."""
        rows = _rows_of(outputs)
        logprobs = self._sampler.sample(logits.cpu(), self._vocab_size, rows).numpy()
        finite = np.isfinite(logprobs).all(1)
        return [
            SampledToken(token, policy, behavior) if sound and token >= 0 else _failed(token, output)
            for token, policy, behavior, sound, output in zip(
                rows.tokens.tolist(), logprobs[:, 0], logprobs[:, 1], finite, outputs, strict=True
            )
        ]


def _rows_of(outputs: tuple[OutputRow, ...]) -> RowsToSample:
    none = np.empty(0, np.int64)
    filters, barred = [(0.0, 1.0, 0.0)] * len(outputs), [none] * len(outputs)
    kinds, tokens = [GIVEN] * len(outputs), [-1] * len(outputs)
    for i, output in enumerate(outputs):
        sequence = output.sequence
        if sequence.request is None or output.given:
            tokens[i] = sequence.token_ids[output.position + 1]
            continue
        sampling = sequence.request.sampling
        kinds[i] = GREEDY if sampling.greedy else DRAW
        if sampling.filtered:
            kinds[i] += FILTERED
            filters[i] = (float(sampling.top_k), sampling.top_p, sampling.min_p)
            barred[i] = sequence.barred
    return RowsToSample(
        temperatures=torch.tensor([o.sequence.temperature for o in outputs], dtype=torch.float32),
        states=torch.tensor([row_state(o.sequence.seed, o.position) & MASK32 for o in outputs], dtype=torch.int64),
        kinds=torch.tensor(kinds, dtype=torch.int64),
        filters=torch.tensor(filters, dtype=torch.float64),
        bars=torch.from_numpy(np.cumsum([0, *(len(b) for b in barred)])),
        barred=torch.from_numpy(np.concatenate([none, *(b for b in barred if len(b))])),
        tokens=torch.tensor(tokens, dtype=torch.int64),
    )


def _failed(token: int, output: OutputRow) -> SampledToken:
    error: RolloutError
    if token == NOTHING_LEFT:
        error = InvalidRequest("the filters bar every token; nothing is left to sample", field="sampling")
    else:
        error = ParityError(
            f"the model's logits after position {output.position} hold NaN or no finite candidate; "
            "the weights being served are broken"
        )
    return SampledToken(token, np.float32(np.nan), np.float32(np.nan), error)
