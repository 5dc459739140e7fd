"""Localise from digests that both sides recorded in production, without replaying anything."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollout.activation_log import ActivationDigests, digest_rows
from rollout.kernels.base import BoundPacked
from rollout.types import UInt64Array
from trainer_bridge.explain.findings import Cause, Finding
from trainer_bridge.forward import TrainingForward


class _RecordingKernels:
    """The trainer's kernel set, with every key and value it is given hashed on the way."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[tuple[torch.Tensor, UInt64Array]] = []
        """(cu_seqlens, digests [T]) of each layer's call, in order"""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def bind_packed(self, cu_seqlens: torch.Tensor) -> BoundPacked:
        """See ``KernelSet.bind_packed``."""
        return _RecordingPass(self._inner.bind_packed(cu_seqlens), cu_seqlens, self.calls)


@dataclass(frozen=True, slots=True)
class _RecordingPass:
    """One pass of the kernel set."""

    inner: BoundPacked
    cu_seqlens: torch.Tensor
    calls: list[tuple[torch.Tensor, UInt64Array]]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """See ``BoundPacked.attend``."""
        self.calls.append((self.cu_seqlens, digest_rows(k, v)))
        return self.inner.attend(layer, q, k, v, scale)


class TrainerLog:
    """Digests of every sequence that went through the forward while it was recorded."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._batches: list[list[UInt64Array]] = []

    def take(self, kernels: _RecordingKernels) -> None:
        """Sort the calls of whole forward passes into sequences."""
        for start in range(0, len(kernels.calls) - self._layers + 1, self._layers):
            calls = kernels.calls[start : start + self._layers]
            edges = calls[0][0].tolist()
            stacked = np.stack([digests for _, digests in calls])
            self._batches.append([stacked[:, a:b] for a, b in itertools.pairwise(edges)])

    def digests(self, sample_ids: Sequence[str], token_ids: Sequence[Sequence[int]]) -> list[ActivationDigests]:
        """One record a sequence, in the order they were fed; ``token_ids`` are those fed."""
        fed = [layers for batch in self._batches for layers in batch]
        return [
            ActivationDigests(name, tuple(ids), layers)
            for name, ids, layers in zip(sample_ids, token_ids, fed, strict=True)
        ]


@contextlib.contextmanager
def recording(forward: TrainingForward) -> Iterator[TrainerLog]:
    """Record digests of keys and values of everything the forward computes inside the block."""
    log = TrainerLog(forward.model.spec.num_layers)
    plain = forward.model.kernels
    recorder = _RecordingKernels(plain)
    forward.model.kernels = recorder  # type: ignore[assignment]
    try:
        yield log
    finally:
        forward.model.kernels = plain
        log.take(recorder)


def localise_recorded(rollout: ActivationDigests, trainer: ActivationDigests) -> Finding:
    """First layer at which keys or values differ, and its first token."""
    size = min(len(rollout.token_ids), len(trainer.token_ids))
    ours, theirs = np.array(rollout.token_ids[:size]), np.array(trainer.token_ids[:size])
    if not np.array_equal(ours, theirs):
        at = int(np.flatnonzero(ours != theirs)[0])
        words = f"token {at} is {ours[at]} for the rollout and {theirs[at]} for the trainer"
        return Finding(Cause.INPUTS, "ids", f"position {at}", words)
    if len(rollout.layers) != len(trainer.layers):
        words = f"the rollout recorded {len(rollout.layers)} layers, the trainer {len(trainer.layers)}"
        return Finding(Cause.WEIGHTS, "shape", "layers", words)
    differ = rollout.layers[:, :size] != trainer.layers[:, :size]
    if not differ.any():
        words = f"keys and values of all {len(differ)} layers are equal at all {size} tokens"
        return Finding(Cause.NONE, "equal", "", f"{words}: what differs lies behind the last layer's keys")
    layer = int(np.flatnonzero(differ.any(1))[0])
    row = int(np.flatnonzero(differ[layer])[0])
    if layer == 0:
        where = "weights, embedding, positions, or the first layer's norm, projections or rotation"
    else:
        where = f"layer {layer - 1} from its attention on, or layer {layer} up to its rotation"
    words = f"keys or values of layer {layer} are the first to differ, from token {row} on: look at {where}"
    count = int(differ[layer].sum())
    return Finding(
        Cause.NUMERICS, "recorded", f"layers.{layer}.keys", words, {"layer": layer, "row": row, "rows": count}
    )
