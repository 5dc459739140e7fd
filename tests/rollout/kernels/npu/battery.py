"""A small certificate of the NPU set: how many values differ, check by check. The certificate proper is
rollout/certify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rollout.kernels.base import KVLayout
from rollout.kernels.npu.kernel_set import NpuKernelSet
from rollout.kernels.npu.norm import rms_norm
from rollout.kernels.npu.probe import seen_by_sums
from rollout.kernels.probe import cancelling_product
from tests.rollout.kernels.dense import dense, edges, rows

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


def company(kernels: NpuKernelSet) -> int:
    """Decode rows that change with the batch around them, near a length at which keys could be split."""
    sequence = Probe(kernels, 1664)
    positions = [1663, 1662, 1660, 1657, 1400, 200, 127]
    together, alone = sequence.decoded(positions), sequence.decoded(positions, together=False)
    many = sequence.decoded(positions + positions + positions)[: len(positions)]
    return len(unequal_rows(together, alone)) + len(unequal_rows(many, alone))


def against_oracle(kernels: NpuKernelSet) -> int:
    """Rows, of training and of decode, further from float64 than rounding explains."""
    sequence = Probe(kernels, 700)
    wanted, _ = dense(sequence.q, sequence.k, sequence.v, SCALE)
    positions = [0, 5, 127, 128, 300, 511, 512, 600, 699]
    far = (sequence.trained().double() - wanted).abs().amax((1, 2)) > 2e-2
    decoded = (sequence.decoded(positions).double() - wanted[positions]).abs().amax((1, 2))
    return int(far.sum()) + int((~(decoded <= 2e-2)).sum())


def products(kernels: NpuKernelSet) -> int:
    """Rows of a product that change with the rows beside them, through mm, addmm, matmul and linear."""
    x, weight = cancelling_product(150, 96, 64, torch.bfloat16)
    bias = weight[:, 0].clone()
    count = 0
    forms: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda rows: rows @ weight.T,
        lambda rows: torch.nn.functional.linear(rows, weight, bias),
        lambda rows: torch.nn.functional.linear(rows[None], weight)[0],
        lambda rows: torch.log_softmax(torch.nn.functional.linear(rows, weight).float(), -1),
    ]
    with kernels.invariant_mode():
        for form in forms:
            whole = form(x)
            for at, size in ((0, 1), (17, 1), (149, 1), (0, 40), (100, 50)):
                count += len(unequal_rows(form(x[at : at + size]), whole[at : at + size]))
    return count


def norms(kernels: NpuKernelSet, norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None) -> int:
    """Rows of an RMSNorm that change with the rows beside them."""
    x, weight = rows(5, 140, 1, 96)[:, 0], rows(6, 1, 1, 96)[0, 0]
    run = norm or (lambda rows, gamma: rms_norm(rows, gamma, 1e-6, tiled=kernels.runtime.package is None))
    whole = run(x, weight)
    return sum(len(unequal_rows(run(x[a:b], weight), whole[a:b])) for a, b in ((0, 1), (3, 5), (100, 140)))


def battery(kernels: NpuKernelSet) -> dict[str, int]:
    """Check -> values or rows that failed; all zero for a sound set."""
    positions = [0, 1, 63, 127, 128, 191, *SENSITIVE, 255, 256, 383, 511, 512, 639, 699]
    return {
        "decode against training": len(decode_against_training(kernels, positions, 700)),
        "sums": len(decode_against_training(seen_by_sums(kernels), positions, 700)),
        "company": company(kernels),
        "oracle": against_oracle(kernels),
        "products": products(kernels),
        "norms": norms(kernels),
    }
