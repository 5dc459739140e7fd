"""The NPU set's paged KV cache: [pages, 128, H_kv, D] per layer, contiguous, zero-initialised."""

from __future__ import annotations

import numpy as np
import torch

from rollout.errors import ConfigError
from rollout.kernels.base import KVLayout, KVStore

MAX_ELEMENTS = 2**32
"""Elements of one layer's K: the kernel computes page offsets in uint32."""


class NpuKVStore(KVStore):
    """K and V per layer. A page is cleared when its first row is written, so what follows a row is always finite."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        shape = (layout.num_pages, layout.page_size, layout.num_kv_heads, layout.head_dim)
        if (elements := int(np.prod(shape, dtype=np.int64))) >= MAX_ELEMENTS:
            most = MAX_ELEMENTS // (layout.num_kv_heads * layout.head_dim)
            raise ConfigError(
                f"{elements} elements of K in one layer overflow the kernel's 32-bit page offsets; "
                f"keep engine.kv_cache_tokens below {most}",
                field="engine.kv_cache_tokens",
            )
        self.layout = layout
        self.keys = torch.zeros(layout.num_layers, *shape, dtype=layout.dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Host or device slots; clears pages that begin here. A bound step does the same with prepared indices."""
        begun = begun_pages(slots.cpu().numpy(), self.layout.page_size)
        self.clear(layer, torch.from_numpy(begun).to(self.keys.device))
        self.put(layer, key, value, slots.to(self.keys.device))

    def clear(self, layer: int, pages: torch.Tensor) -> None:
        """Zero whole pages: int64 [n] page numbers on the store's device."""
        if pages.numel():
            self.keys[layer].index_fill_(0, pages, 0)
            self.values[layer].index_fill_(0, pages, 0)

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Store rows at device slots."""
        for cache, rows in ((self.keys, key), (self.values, value)):
            cache[layer].view(-1, *cache.shape[3:]).index_copy_(0, slots, rows)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as they were written: slots int64 [T] -> key, value [T, H_kv, D]."""
        at = slots.to(self.keys.device)
        keys, values = (
            cache[layer].view(-1, *cache.shape[3:]).index_select(0, at) for cache in (self.keys, self.values)
        )
        return keys, values

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """On the device; what follows the rows is cleared, as in every page that was begun."""
        for cache in (self.keys, self.values):
            cache[:, target, :count] = cache[:, source, :count]
            cache[:, target, count:] = 0

    def poison(self) -> None:
        """NaN in every slot."""
        self.keys.fill_(float("nan"))
        self.values.fill_(float("nan"))


def begun_pages(slots: np.ndarray, page_size: int) -> np.ndarray:
    """int64 numbers of the pages whose first slot is among ``slots``."""
    pages: np.ndarray = slots[slots % page_size == 0] // page_size
    return pages.astype(np.int64)
