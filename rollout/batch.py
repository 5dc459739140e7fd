"""Tensors of one step, built from the schedule with numpy, one pass per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollout.placement import Placement
from rollout.scheduler import ScheduledRows
from rollout.sequence import Sequence


@dataclass(frozen=True, slots=True)
class OutputRow:
    """A row whose logits are wanted."""

    sequence: Sequence
    position: int
    """index of the token fed at this row; its logits are those of position + 1"""

    @property
    def given(self) -> bool:
        """Whether the next token is known, so that it is scored instead of drawn."""
        return self.position + 1 < len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T rows of B sequences, packed."""

    input_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]"""
    page_table: torch.Tensor
    """int32 [B, max_pages]; unused entries repeat page 0 and are never read"""
    cache_seqlens: torch.Tensor
    """int32 [B]"""
    cu_seqlens_q: torch.Tensor
    """int32 [B + 1]"""
    output_rows: torch.Tensor
    """int64 [N] rows of the pass whose logits are wanted"""
    outputs: tuple[OutputRow, ...]
    """[N]"""
    wants_digests: bool
    ranges: tuple[tuple[Placement, int, int], ...]
    """[B] where the images of a sequence are, and which of its tokens are here: first, count"""


def _output_range(rows: ScheduledRows) -> range:
    """Positions of this sequence's rows whose logits are wanted."""
    sequence = rows.sequence
    first, last = sequence.num_computed, sequence.num_computed + rows.count
    return range(max(first, sequence.num_reusable), last)


def build_batch(scheduled: list[ScheduledRows], page_size: int) -> StepBatch:
    """Pack the scheduled rows; the pages they need must have been taken."""
    counts = np.array([r.count for r in scheduled], np.int32)
    edges = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    total = int(edges[-1])
    ids, positions, slots = (np.empty(total, np.int64) for _ in range(3))
    table = np.zeros((len(scheduled), max(len(r.sequence.pages) for r in scheduled)), np.int32)
    outputs: list[OutputRow] = []
    output_rows: list[int] = []
    for b, rows in enumerate(scheduled):
        sequence, first = rows.sequence, rows.sequence.num_computed
        here = slice(edges[b], edges[b + 1])
        ids[here] = sequence.token_ids[first : first + rows.count]
        positions[here] = np.arange(first, first + rows.count)
        table[b, : len(sequence.pages)] = sequence.pages
        slots[here] = table[b, positions[here] // page_size].astype(np.int64) * page_size + positions[here] % page_size
        for position in _output_range(rows):
            outputs.append(OutputRow(sequence, position))
            output_rows.append(int(edges[b]) + position - first)
    starts = np.array([r.sequence.num_computed for r in scheduled], np.int32)
    return StepBatch(
        input_ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        page_table=torch.from_numpy(table),
        cache_seqlens=torch.from_numpy(starts + counts),
        cu_seqlens_q=torch.from_numpy(edges),
        output_rows=torch.tensor(output_rows, dtype=torch.int64),
        outputs=tuple(outputs),
        wants_digests=any(o.sequence.row_digests for o in outputs),
        ranges=tuple((r.sequence.placement, r.sequence.num_computed, r.count) for r in scheduled),
    )
