"""Fourth question: at which operation do the numbers part? Token, then layer, then operation, by digests of taps.

Taps are in order of execution and the model is causal. So where a tap is the first to differ at any row up to the
mismatch, everything it was computed from is equal on both sides: it is a root, not an echo.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from rollout.taps import Trace, TraceRequest
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.sides import Side

AGAIN = "the same once more"
_ALONE = 16
"""Rows before the mismatch that are computed one at a time, as the pieces of a chunked prefill may have been."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tap and the first row at which it differs."""

    tap: str
    row: int
    rows: int
    """rows up to the mismatch that differ at this tap"""

    @property
    def layer(self) -> int | None:
        """Index of the layer, if the tap lies in one."""
        return int(self.tap.split(".")[1]) if self.tap.startswith("layers.") else None

    @property
    def operation(self) -> str:
        """Name without the layer."""
        return self.tap.split(".", 2)[2] if self.layer is not None else self.tap


@dataclass(frozen=True, slots=True)
class Run:
    """One way a side computes the sample."""

    side: Side
    request: TraceRequest
    words: str

    def trace(self, **changes: object) -> Trace:
        """Replay with some fields of the request replaced."""
        return self.side.trace(dataclasses.replace(self.request, **changes))  # type: ignore[arg-type]


def first_unequal(left: Trace, right: Trace, until: int) -> Place | None:
    """First tap, in order of execution, with an unequal row in [0, until]; taps of one side only are passed over."""
    for tap, ours in left.digests.items():
        theirs = right.digests.get(tap)
        if theirs is None:
            continue
        size = min(len(ours), len(theirs), until + 1)
        rows = np.flatnonzero(ours[:size] != theirs[:size])
        if rows.size:
            return Place(tap, int(rows[0]), int(rows.size))
    return None


def localise(left: Run, right: Run, until: int) -> Place | None:
    """Layer first, by a few taps of every layer; then every tap of that layer."""
    coarse = first_unequal(left.trace(within=None), right.trace(within=None), until)
    if coarse is None or coarse.layer is None:
        return coarse
    inside = f"layers.{coarse.layer}."
    fine = first_unequal(left.trace(within=inside), right.trace(within=inside), until)
    return fine or coarse


def strangers(case: Case) -> tuple[tuple[int, ...], ...]:
    """Two sequences made of the sample's own tokens, of lengths that change every tile."""
    ids = case.fed_ids
    return (tuple(reversed(ids)) * 9)[:9], (ids * 33)[:33]


def runs_of(side: Side, case: Case, path: str, until: int) -> tuple[Run, ...]:
    """The same rows in other company and in other pieces: an invariant side gives one answer to all of them."""
    ids, start = case.fed_ids[: until + 1], case.start
    base = TraceRequest(ids, logits_from=min(start, until), path=path)  # type: ignore[arg-type]
    if path == "training":
        company = case.trainer_company or strangers(case)
        return (
            Run(side, base, "alone"),
            Run(side, base, AGAIN),
            Run(side, dataclasses.replace(base, company=company), "packed with others"),
            Run(side, dataclasses.replace(base, company=strangers(case)[:1]), "packed with another one"),
        )
    decode = dataclasses.replace(base, decode_from=len(case.prompt))
    company = case.rollout_company or strangers(case)
    third = max(1, len(case.prompt) // 3 | 1)
    return (
        Run(side, decode, "prefill, then decode"),
        Run(side, decode, AGAIN),
        Run(side, base, "in one pass"),
        Run(side, dataclasses.replace(decode, company=company), "decode in company"),
        Run(side, dataclasses.replace(decode, chunk=third), f"prefill in chunks of {third}"),
        Run(side, dataclasses.replace(base, decode_from=max(1, until - _ALONE)), "last rows one at a time"),
    )


def unstable(runs: tuple[Run, ...], until: int) -> tuple[Run, Run, Place] | None:
    """The first pair of runs of one side that do not agree, and where."""
    for other in runs[1:]:
        place = localise(runs[0], other, until)
        if place is not None:
            return runs[0], other, place
    return None
