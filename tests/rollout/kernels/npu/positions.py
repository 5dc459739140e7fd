"""One attention of the NPU set, position by position: where decode and training part, which the certificate's counts do
not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rollout.kernels.base import KVLayout
from rollout.kernels.npu.kernel_set import NpuKernelSet
from tests.rollout.kernels.dense import edges, rows

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 16, 0.31
"""The scale is not 1/sqrt(DIM): a kernel that brings its own shows."""


SENSITIVE = (192, 193, 200, 210, 223, 230, 240, 250, 254, *range(384, 511, 6))
"""Positions at which the later line's two orders of a row sum can differ."""


def bits(x: torch.Tensor) -> np.ndarray:
    return x.detach().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).numpy()


@dataclass
class Probe:
    """Random q, k, v of one sequence and its pages in a store of its own."""

    kernels: NpuKernelSet
    length: int
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    heads: int = HEADS
    dim: int = DIM
    q: torch.Tensor = field(init=False)
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.q = rows(self.seed, self.length, self.heads, self.dim, self.dtype)
        self.k, self.v = (rows(self.seed + i, self.length, KV_HEADS, self.dim, self.dtype) for i in (1, 2))

    def trained(self) -> torch.Tensor:
        cu = edges([self.length])
        return self.kernels.attention_varlen(
            self.q, self.k, self.v, cu_seqlens_q=cu, cu_seqlens_k=cu, softmax_scale=SCALE
        )

    def store(self) -> object:
        pages = -(-self.length // 128)
        store = self.kernels.allocate_kv(KVLayout(1, pages + 1, 128, KV_HEADS, self.dim, self.dtype))
        store.poison()
        store.write(0, self.k, self.v, torch.arange(128, 128 + self.length))
        return store

    def decoded(self, positions: Sequence[int], together: bool = True) -> torch.Tensor:
        """Each position as a decode row: all in one call, or each in a call of its own."""
        groups = [list(positions)] if together else [[p] for p in positions]
        return torch.cat([self._decode(group) for group in groups])

    def _decode(self, group: list[int]) -> torch.Tensor:
        pages = -(-self.length // 128)
        return self.kernels.attention_with_kvcache(
            self.q[group],
            self.store(),  # type: ignore[arg-type]
            0,
            page_table=torch.arange(1, pages + 1, dtype=torch.int32).expand(len(group), -1).contiguous(),
            cache_seqlens=torch.tensor([p + 1 for p in group], dtype=torch.int32),
            cu_seqlens_q=edges([1] * len(group)),
            softmax_scale=SCALE,
        )


def unequal_rows(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """Rows of which any value differs in bits."""
    differs = (bits(a) != bits(b)).reshape(len(a), -1).any(1)
    return np.flatnonzero(differs).tolist()


def decode_against_training(
    kernels: NpuKernelSet,
    positions: Sequence[int],
    length: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = HEADS,
    dim: int = DIM,
) -> list[int]:
    """Positions at which a decode row is not the training row."""
    sequence = Probe(kernels, length, seed, dtype, heads, dim)
    trained, decoded = sequence.trained(), sequence.decoded(positions)
    return [positions[i] for i in unequal_rows(decoded, trained[list(positions)])]
