"""Rollout steps of the whole model over pages of their own, outside the engine: chosen rows, pages and company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.attention import PackedStep, PagedStep
from rollout.certify.subject import Subject
from rollout.replay_pages import ReplayPages


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [first, last) of one sequence in a step."""

    sequence: int
    first: int
    last: int
    wanted: bool = True
    """whether their logits are; a prefill is most of a step's rows and its head most of the work"""


class Steps:
    """A poisoned cache and the sequences in it."""

    def __init__(self, subject: Subject, sequences: Sequence[torch.Tensor], *, seed: int | None = None) -> None:
        self._subject = subject
        self._sequences = list(sequences)
        lengths = [len(ids) for ids in sequences]
        self._pages = ReplayPages(subject.kernels, subject.spec, lengths, spare=2, seed=seed)

    @torch.no_grad()
    def run(self, rows: Sequence[Rows]) -> list[torch.Tensor]:
        """One step; logits [last - first, >= V] of every wanted range, in order. Call in invariant mode."""
        subject, store = self._subject, self._pages.store
        positions = torch.cat([torch.arange(r.first, r.last) for r in rows])
        ids = torch.cat([self._sequences[r.sequence][r.first : r.last] for r in rows])
        slots = torch.cat([self._pages.slots(r.sequence, r.first, r.last) for r in rows])
        table = self._pages.table[[r.sequence for r in rows]].contiguous()
        seqlens = torch.tensor([r.last for r in rows], dtype=torch.int32)
        cu = torch.tensor([0, *(r.last - r.first for r in rows)]).cumsum(0).to(torch.int32)
        if subject.decoder is not None:
            hidden = subject.decoder.hidden_states(ids, positions, slots, store, table, seqlens, cu)
            head = subject.decoder.logits
        else:
            step = PagedStep(subject.kernels, store, slots, table, seqlens, cu)
            hidden, head = subject.model.hidden_states(ids, positions, step), subject.model.logits
        parts = hidden.split([r.last - r.first for r in rows])
        kept = [part for part, r in zip(parts, rows, strict=True) if r.wanted]
        return list(head(torch.cat(kept)).split([len(part) for part in kept])) if kept else []


@torch.no_grad()
def training_logits(subject: Subject, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The training forward over packed whole sequences: logits [S, >= V] of each. Call in invariant mode."""
    lengths = [len(ids) for ids in sequences]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = subject.model.hidden_states(torch.cat(list(sequences)), positions, PackedStep(subject.kernels, cu))
    return list(subject.model.logits(hidden).split(lengths))
