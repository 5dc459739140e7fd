"""From logits rows to tokens and log-probs: C1 and C2 applied row by row, the same path for every row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollout.batch import OutputRow
from rollout.errors import InvalidRequest, ParityError, RolloutError
from rollout.kernels.cpu.sampler import CpuSampler
from rollout.logprobs import policy_logprob_rows
from rollout.sampling import behavior_logprob, kept_tokens

_SLICE = 64
"""Rows whose log-probs are held at once: bounds memory at a long prompt's scoring; rows are independent."""


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
        self._draws = CpuSampler()

    def run(self, logits: torch.Tensor, outputs: tuple[OutputRow, ...]) -> list[SampledToken]:
        """logits [N, >= V] -> one SampledToken per row."""
        result: list[SampledToken] = []
        for start in range(0, len(outputs), _SLICE):
            part = outputs[start : start + _SLICE]
            temperatures = torch.tensor([o.sequence.temperature for o in part], dtype=torch.float32)
            rows = policy_logprob_rows(logits[start : start + len(part)], temperatures, self._vocab_size).cpu().numpy()
            result.extend(self._row(row, output) for row, output in zip(rows, part, strict=True))
        return result

    def _row(self, logprobs: np.ndarray, output: OutputRow) -> SampledToken:
        sequence = output.sequence
        keep: np.ndarray | None = None
        if sequence.request is None or output.given:
            token = sequence.token_ids[output.position + 1]
        else:
            sampling = sequence.request.sampling
            if sampling.filtered:
                keep = kept_tokens(logprobs, sampling, sequence.barred)
                if not keep.any():
                    nothing = InvalidRequest("the filters bar every token; nothing is left to sample", field="sampling")
                    return SampledToken(-1, np.float32(np.nan), np.float32(np.nan), nothing)
            if sampling.greedy:
                candidates = logprobs if keep is None else np.where(keep, logprobs, np.float32(-np.inf))
                token = int(np.argmax(candidates)) if not np.isnan(logprobs).any() else -1
            else:
                token = self._draws.draw(logprobs, keep, sequence.seed, output.position)
        if token < 0 or not np.isfinite(logprobs[token]):
            return SampledToken(token, np.float32(np.nan), np.float32(np.nan), self._broken_row(output))
        policy = np.float32(logprobs[token])
        return SampledToken(token, policy, behavior_logprob(policy, logprobs, keep))

    @staticmethod
    def _broken_row(output: OutputRow) -> RolloutError:
        return ParityError(
            f"the model's logits after position {output.position} hold NaN or no finite candidate; "
            "the weights being served are broken"
        )
