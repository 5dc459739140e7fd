"""How one attention call is cut into jobs; made once a step, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

QUERY_TILE = 16
"""Query rows a task handles; rows are independent, so it changes speed only."""
ATTENTION_WORTH_A_THREAD = 65536
"""Multiply-adds from which handing half of them to a second thread pays."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Sequences of a call and their tasks: task = (sequence, query tile)."""

    page_table: npt.NDArray[np.int32]
    """[B, max_pages]"""
    cache_seqlens: npt.NDArray[np.int32]
    """[B]"""
    cu_seqlens_q: npt.NDArray[np.int32]
    """[B + 1]"""
    tasks: npt.NDArray[np.int32]
    """[n, 2] sequence, first query row within it"""
    cost: int
    """query rows times keys, over all tasks"""
    addresses: tuple[int, int, int, int]
    """of page_table, cache_seqlens, cu_seqlens_q, tasks"""

    @property
    def sizes(self) -> tuple[int, int]:
        """Sequences, pages per sequence in the table."""
        return self.page_table.shape

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """In the kernel's order."""
        return self.page_table, self.cache_seqlens, self.cu_seqlens_q, self.tasks


def plan_attention(page_table: np.ndarray, cache_seqlens: np.ndarray, cu_seqlens_q: np.ndarray) -> AttentionPlan:
    """Cut every sequence's queries into tiles."""
    lengths = np.diff(cu_seqlens_q)
    tiles = (lengths + QUERY_TILE - 1) // QUERY_TILE
    sequence = np.repeat(np.arange(len(lengths), dtype=np.int32), tiles)
    within = np.arange(len(sequence), dtype=np.int32) - np.repeat(np.cumsum(tiles) - tiles, tiles).astype(np.int32)
    tasks = np.stack((sequence, within * QUERY_TILE), axis=1).astype(np.int32)
    rows = np.minimum(lengths[tasks[:, 0]] - tasks[:, 1], QUERY_TILE).astype(np.int64)
    cost = int(rows @ cache_seqlens[tasks[:, 0]].astype(np.int64))
    arrays = page_table, cache_seqlens, cu_seqlens_q, tasks
    return AttentionPlan(*arrays, cost, tuple(a.__array_interface__["data"][0] for a in arrays))
