"""From logits rows to tokens and log-probs: C1 and C2 applied row by row, the same path for every row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollout.batch import OutputRow
from rollout.errors import InvalidRequest, ParityError, RolloutError
from rollout.kernels.cpu.sampler import DRAW, GIVEN, GREEDY, CpuSampler
from rollout.logprobs import policy_logprob_rows
from rollout.sampling import MASK32, behavior_logprob, kept_tokens, row_state


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
        logits = logits.cpu()
        temperatures = torch.tensor([o.sequence.temperature for o in outputs], dtype=torch.float32)
        kinds = torch.tensor([_kind(o) for o in outputs])
        states = torch.tensor([row_state(o.sequence.seed, o.position) & MASK32 for o in outputs])
        tokens = torch.tensor([_given(o) for o in outputs])
        policy = self._sampler.sample(logits, self._vocab_size, temperatures, states, kinds, tokens).numpy()
        result: list[SampledToken] = []
        for i, (output, token) in enumerate(zip(outputs, tokens.tolist(), strict=True)):
            request = output.sequence.request
            if request is not None and request.sampling.filtered:
                result.append(self._filtered(logits[i : i + 1], temperatures[i : i + 1], output))
            elif token < 0 or not np.isfinite(policy[i]):
                result.append(SampledToken(token, np.float32(np.nan), np.float32(np.nan), _broken_row(output)))
            else:
                result.append(SampledToken(token, policy[i], policy[i]))
        return result

    def _filtered(self, logits: torch.Tensor, temperature: torch.Tensor, output: OutputRow) -> SampledToken:
        """A row whose distribution is cut: the whole row of log-probs is needed."""
        sequence = output.sequence
        assert sequence.request is not None
        logprobs = policy_logprob_rows(logits, temperature, self._vocab_size).numpy()[0]
        keep = kept_tokens(logprobs, sequence.request.sampling, sequence.barred)
        if not keep.any():
            nothing = InvalidRequest("the filters bar every token; nothing is left to sample", field="sampling")
            return SampledToken(-1, np.float32(np.nan), np.float32(np.nan), nothing)
        if sequence.request.sampling.greedy:
            token = int(np.argmax(np.where(keep, logprobs, -np.inf))) if not np.isnan(logprobs).any() else -1
        else:
            token = self._sampler.draw(logprobs, keep, sequence.seed, output.position)
        if token < 0 or not np.isfinite(logprobs[token]):
            return SampledToken(token, np.float32(np.nan), np.float32(np.nan), _broken_row(output))
        policy = np.float32(logprobs[token])
        return SampledToken(token, policy, behavior_logprob(policy, logprobs, keep))


def _kind(output: OutputRow) -> int:
    request = output.sequence.request
    if request is None:
        return GIVEN
    return GREEDY if request.sampling.greedy else DRAW


def _given(output: OutputRow) -> int:
    sequence = output.sequence
    return sequence.token_ids[output.position + 1] if sequence.request is None else -1


def _broken_row(output: OutputRow) -> RolloutError:
    return ParityError(
        f"the model's logits after position {output.position} hold NaN or no finite candidate; "
        "the weights being served are broken"
    )
