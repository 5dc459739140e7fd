"""Logits of one sample by one side, and the contract's reading of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.logprobs import policy_logprobs
from rollout.types import Float32Array, SamplingParams


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits of a sample and what is read from them. L tokens."""

    logits: torch.Tensor
    """[L, >= V] in the model's dtype; row i scores token i"""
    targets: torch.Tensor
    """int64 [L]"""
    temperature: float
    """float32 value, > 0"""
    vocab: int
    sampling: SamplingParams | None
    prompt: tuple[int, ...] = ()
    """[P] ids that every row has seen"""

    def plain(self, temperature: float | None = None, vocab: int | None = None) -> Float32Array:
        """The contract's log-probs, [L]; with another divisor or number of columns where given."""
        value = self.temperature if temperature is None else temperature
        divisor = torch.full((len(self.targets),), value, dtype=torch.float32)
        return array(policy_logprobs(self.logits, self.targets, divisor, vocab or self.vocab))

    def gather(self, rows: torch.Tensor) -> Float32Array:
        """[L, V] -> [L] float32 at the targets."""
        return array(rows.gather(1, self.targets[:, None])[:, 0].float())

    def cut(self, rows: slice, targets: slice) -> Rows:
        """Some rows, read at some targets."""
        return Rows(
            self.logits[rows], self.targets[targets], self.temperature, self.vocab, self.sampling, self.prompt
        )  # fmt: skip

    @property
    def divisor(self) -> torch.Tensor:
        """float32 [L, 1]"""
        return torch.full((len(self.targets), 1), self.temperature)

    @property
    def wide(self) -> torch.Tensor:
        """float32 [L, V]"""
        return self.logits[:, : self.vocab].float()

    @property
    def tempered(self) -> torch.Tensor:
        """float32 [L, V], divided by the temperature."""
        return self.wide / self.divisor


def array(values: torch.Tensor) -> Float32Array:
    """float32 numpy view."""
    result: Float32Array = values.numpy()
    return result
