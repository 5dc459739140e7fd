"""A small policy-gradient trainer: float32 masters, one cast to the served dtype, the aligned forward, GRPO's loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout.model import SharedModel
from rollout.types import Float32Array, UInt64Array
from rollout.weights import digest_of, root_digest
from trainer_bridge.forward import TrainingForward, TrainingSample


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A sample with its advantage."""

    sample: TrainingSample
    advantage: float


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The training forward's view of a batch, in the order it was given."""

    logprobs: tuple[Float32Array, ...]
    """per sample, [L] nats"""
    digests: tuple[UInt64Array | None, ...]
    """per sample, [L]"""
    loss: float


def group_advantages(rewards: Sequence[float], group: int) -> list[float]:
    """GRPO (Shao et al. 2024): reward minus group mean over group deviation; 0 where a group agrees."""
    values = np.asarray(rewards, np.float64).reshape(-1, group)
    spread = values.std(axis=1, keepdims=True)
    centred = values - values.mean(axis=1, keepdims=True)
    scaled: list[float] = np.where(spread > 0, centred / np.where(spread > 0, spread, 1.0), 0.0).reshape(-1).tolist()
    return scaled


class Trainer:
    """Owns the trained weights: float32 masters beside the model's parameters, which hold their single rounding."""

    def __init__(self, model: SharedModel, *, learning_rate: float, threads: int) -> None:
        self.model = model
        self.forward = TrainingForward(model)
        self._threads = threads
        self._parameters = dict(model.parameters())
        self._masters = {name: p.detach().float().clone().requires_grad_() for name, p in self._parameters.items()}
        self._optimizer = torch.optim.AdamW(self._masters.values(), lr=learning_rate, weight_decay=0.0, foreach=False)

    def learn(self, batch: Sequence[TrainedSample], *, micro_batch: int, digests: bool) -> ScoredBatch:
        """Forward, backward and one optimizer step; returns the forward's log-probs under the weights before it.

        The policy ratio's denominator is the forward's own value: on policy it equals the rollout's, bit for bit.
        """
        torch.set_num_threads(self._threads)
        total = sum(len(b.sample.token_ids) for b in batch)
        logprobs: list[Float32Array] = []
        hashed: list[UInt64Array | None] = []
        loss_sum = 0.0
        with self.forward.aligned():
            for start in range(0, len(batch), micro_batch):
                part = batch[start : start + micro_batch]
                out = self.forward([b.sample for b in part], digests=digests)
                ratio = torch.exp(out.logprobs - out.logprobs.detach())
                weight = np.repeat(np.array([b.advantage for b in part], np.float32), out.lengths)
                loss = -(ratio * torch.from_numpy(weight).to(ratio.device)).sum() / total
                loss.backward()
                loss_sum += float(loss.detach())
                logprobs += [t.detach().cpu().numpy() for t in out.split()]
                hashed += out.split_digests()
        self._step()
        return ScoredBatch(tuple(logprobs), tuple(hashed), loss_sum)

    @torch.no_grad()
    def _step(self) -> None:
        for name, parameter in self._parameters.items():
            self._masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Named parameters in the served dtype, as they go to the rollout."""
        for name, parameter in self._parameters.items():
            yield name, parameter.detach()

    def tensor_digests(self) -> dict[str, bytes]:
        """Digest of every tensor the trainer holds."""
        return {name: digest_of(name, tensor) for name, tensor in self.tensors()}

    def digest(self) -> str:
        """Root digest of what the trainer holds."""
        return root_digest(self.tensor_digests())
