"""A poisoned KV cache with a table of its own, for steps outside the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.kernels.base import KernelSet, KVLayout
from rollout.model import ModelSpec


class ReplayPages:
    """Pages for B sequences; everything in them is NaN until it is written."""

    def __init__(
        self, kernels: KernelSet, spec: ModelSpec, lengths: Sequence[int], *, spare: int = 0, seed: int | None = None
    ) -> None:
        """
        Args:
            lengths: [B] tokens. spare: pages that no sequence has. seed: of a random order of pages; None: in order.
        """
        self._page = kernels.page_size
        counts = [-(-length // self._page) for length in lengths]
        total = sum(counts) + spare
        layout = KVLayout(spec.num_layers, total, self._page, spec.num_kv_heads, spec.head_dim, spec.dtype)
        self.store = kernels.allocate_kv(layout)
        self.store.poison()
        order = torch.arange(total)
        if seed is not None:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, pages in zip(self.table, order[: sum(counts)].to(torch.int32).split(counts), strict=True):
            row[: len(pages)] = pages

    def slots(self, sequence: int, first: int, last: int) -> torch.Tensor:
        """int64 [last - first] of a sequence's tokens [first, last)."""
        position = torch.arange(first, last)
        return self.table[sequence, position // self._page].to(torch.int64) * self._page + position % self._page
