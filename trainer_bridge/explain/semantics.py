"""Third question: do both sides mean the same by a log-prob?

From one and the same row of logits each usual reading gives its own bits. The reading whose bits are the recorded ones,
at every token, is what that side did; there is no tolerance in it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from rollout.types import Float32Array
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause, Finding
from trainer_bridge.explain.readings import narrowed, readings
from trainer_bridge.explain.rows import Rows

STAGE = "semantics"
_VISIBLE = 1e-2
"""nats; below it, arithmetic alone explains a difference"""
_NEARER = 10.0
_LEAST_TOKENS = 6


def _equal(a: Float32Array, b: Float32Array) -> bool:
    return a.size > 0 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def reads_plainly(rows: Rows, values: Float32Array, mask: npt.NDArray[np.bool_]) -> bool:
    """Whether the recorded values are the contract's, bit for bit, wherever the mask is set."""
    return _equal(rows.plain()[mask], values[mask])


def shifted(rows: Rows, values: Float32Array) -> Finding | None:
    """Values that belong to the neighbouring token, or rows that were read one too late or too early."""
    plain = rows.plain()
    if len(plain) < 3:
        return None
    for shift in (1, -1):
        here = slice(max(0, -shift), len(plain) - max(0, shift))
        there = slice(max(0, shift), len(plain) - max(0, -shift))
        words = f"log-probs are shifted by one: its value of token i is that of token i {'+' if shift > 0 else '-'} 1"
        if _equal(values[here], plain[there]):
            return Finding(Cause.SEMANTICS, "shift", "every token", words, {"shift": shift})
        # Row i + shift read at the target of token i: logits and labels were not aligned.
        if _equal(values[here], rows.cut(there, here).plain()):
            words = f"logits and labels are not aligned: row i {'+' if shift > 0 else '-'} 1 was read for token i"
            return Finding(Cause.SEMANTICS, "shift", "every token", words, {"shift": shift})
    return None


def read(case: Case, rows: Rows, values: Float32Array, side: str) -> Finding | None:
    """The reading that gives a side's recorded values bit for bit, if one does and the contract's does not."""
    mask = case.record.mask
    if reads_plainly(rows, values, mask):
        return None
    if (holes := _holes(rows, values, mask, side)) is not None:
        return holes
    for reading in readings(rows):
        if _equal(reading.compute(rows)[mask], values[mask]):
            sentence = f"on the {side}'s side {reading.words}"
            return Finding(Cause.SEMANTICS, reading.kind, "every token", sentence, {"side": side})
    if mask.all() and (fewer := narrowed(rows, values)) is not None:
        sentence = f"on the {side}'s side {fewer.words}"
        return Finding(Cause.SEMANTICS, fewer.kind, "every token", sentence, {"side": side})
    found = shifted(rows, values)
    if found is None:
        return None
    return dataclasses.replace(found, sentence=f"on the {side}'s side {found.sentence}")


def nearest(case: Case, rows: Rows, values: Float32Array, side: str) -> Finding | None:
    """For another engine's values, whose bits no reading here can give: the reading that is ten times nearer."""
    mask = case.record.mask
    wanted = values[mask].astype(np.float64)
    # With a handful of tokens one of so many readings is near by chance.
    if wanted.size < _LEAST_TOKENS or not np.isfinite(wanted).all():
        return None
    plain = float(np.abs(rows.plain()[mask] - wanted).max())
    if plain < _VISIBLE:
        return None
    found = [(float(np.abs(r.compute(rows)[mask] - wanted).max()), r) for r in readings(rows)]
    distance, reading = min(found, key=lambda item: item[0] if np.isfinite(item[0]) else np.inf)
    if not distance * _NEARER < plain:
        return None
    sentence = (
        f"on the {side}'s side {reading.words}: that brings the largest difference from {plain:.2g} to {distance:.2g} "
        "nat; the rest is arithmetic"
    )
    return Finding(Cause.SEMANTICS, reading.kind, "every token", sentence, {"side": side, "left": distance})


def _holes(rows: Rows, values: Float32Array, mask: npt.NDArray[np.bool_], side: str) -> Finding | None:
    """Right at some tokens, filled in (0.0, a constant, NaN) at the others."""
    plain = rows.plain()
    wrong = mask & (plain.view(np.uint32) != values.view(np.uint32))
    filled = np.unique(values[wrong].view(np.uint32))
    if not 0 < wrong.sum() < mask.sum() or filled.size != 1:
        return None
    value = float(values[wrong][0])
    if value != 0.0 and not np.isnan(value) and np.isfinite(value) and wrong.sum() < 2:
        return None
    at = np.flatnonzero(wrong)
    words = f"on the {side}'s side {len(at)} token(s), first {int(at[0])}, hold {value:g} in place of a log-prob"
    return Finding(Cause.SEMANTICS, "mask", f"token {int(at[0])}", words, {"token": int(at[0])})


def compare_masks(case: Case) -> Finding | None:
    """Tokens that enter on one side only."""
    theirs, ours = case.trainer_mask, case.record.mask
    if theirs is None or len(theirs) != len(ours) or np.array_equal(theirs, ours):
        return None
    at = np.flatnonzero(theirs != ours)
    last = len(ours) - 1
    what = ", the sampled EOS" if list(at) == [last] and not theirs[last] else ""
    left = "left out" if ours[at[0]] else "counted"
    words = f"{len(at)} token(s){what}, first {int(at[0])}, are {left} on the trainer's side only"
    return Finding(Cause.SEMANTICS, "mask", f"token {int(at[0])}", words, {"token": int(at[0])})
