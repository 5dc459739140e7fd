"""The CPU set's paged KV cache."""

from __future__ import annotations

import numpy as np
import torch

from rollout.kernels.base import KVLayout, KVStore
from rollout.kernels.cpu.arrays import array_of
from rollout.kernels.cpu.attention import write_pages


class CpuKVStore(KVStore):
    """K as [layer, page, H_kv, D, token], V as [layer, page, H_kv, token, D]: the order inner loops read them in."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        head = (layout.num_layers, layout.num_pages, layout.num_kv_heads)
        self.keys = torch.zeros(*head, layout.head_dim, layout.page_size, dtype=layout.dtype)
        self.values = torch.zeros(*head, layout.page_size, layout.head_dim, dtype=layout.dtype)
        self._key_arrays = [array_of(k) for k in self.keys]
        self._value_arrays = [array_of(v) for v in self.values]
        self._addresses = [(k.data_ptr(), v.data_ptr()) for k, v in zip(self.keys, self.values, strict=True)]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """One compiled loop over rows; K is transposed on the way in."""
        write_pages(
            array_of(key), array_of(value), slots.numpy(), self._key_arrays[layer], self._value_arrays[layer]
        )  # fmt: skip

    def arrays(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V pages of a layer as numpy views."""
        return self._key_arrays[layer], self._value_arrays[layer]

    def addresses(self, layer: int) -> tuple[int, int]:
        """Where a layer's K and V pages begin."""
        return self._addresses[layer]

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``KVStore.read``."""
        page, offset = slots // self.layout.page_size, slots % self.layout.page_size
        # Two index tensors around a slice put the rows first: [T, H_kv, D] both.
        return self.keys[layer][page, :, :, offset].contiguous(), self.values[layer][page, :, offset].contiguous()

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Two strided copies."""
        self.keys[:, target, ..., :count] = self.keys[:, source, ..., :count]
        self.values[:, target, :, :count] = self.values[:, source, :, :count]

    def poison(self) -> None:
        """NaN in every slot of K and V."""
        self.keys.fill_(float("nan"))
        self.values.fill_(float("nan"))
