"""Fourth question, put together: replay, bisect, judge, and tell a wrong operation from a different or unstable one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollout.manifest_diff import diff_manifests
from rollout.types import Float32Array
from trainer_bridge.explain.bisect import AGAIN, Place, Run, first_unequal, localise, runs_of, unstable
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause, Finding, Notebook
from trainer_bridge.explain.judge import Judgement, judge
from trainer_bridge.explain.sides import Side
from trainer_bridge.ulp import bits

STAGE = "numerics"
_SOME_BITS = 0.1
"""Share of tokens with equal bits that chance does not give."""
_MUCH_NEARER = 4.0


def manifests(rollout: Side, trainer: Side, notes: Notebook) -> tuple[str, ...]:
    """Differences of the manifests that can change bits, as lines."""
    serious = [d for d in diff_manifests(rollout.manifest(), trainer.manifest()) if d.can_change_bits]
    lines = tuple(f"{d} ({d.words})" for d in serious)
    answer = "; ".join(lines[:3]) if lines else "nothing that can change a bit differs"
    notes.note(STAGE, "same manifest?", answer, not lines)
    return lines


def examine(rollout: Side, trainer: Side, case: Case, notes: Notebook, config: Mapping[str, Any]) -> Finding | None:
    """Where the two forwards part; None: every replay agrees with every other."""
    first = case.first_mismatch
    last = len(case.fed_ids) - 1
    until = last if first is None else min(case.start + first, last)
    declared = manifests(rollout, trainer, notes)
    path = "modules" if "modules" in rollout.paths else rollout.paths[0]
    ours, theirs = runs_of(rollout, case, path, until), runs_of(trainer, case, trainer.paths[0], until)
    place = localise(ours[0], theirs[0], until)
    if (fused := _fused(rollout, case, place, ours[0], until, notes)) is not None:
        return fused
    if place is not None:
        notes.note(STAGE, "where do the replays part?", f"{place.tap}, row {place.row}", False)
        return _different(place, ours, theirs, until, notes, config, declared)
    notes.note(STAGE, "where do the replays part?", "nowhere: both sides compute the same alone", True)
    fast = (runs_of(rollout, case, "fused", until),) if rollout.paths[0] == "fused" else ()
    for runs in (theirs, ours, *fast):
        found = unstable(runs, until)
        side = runs[0].side.name
        if found is not None:
            return _not_invariant(found, side, notes, config, until)
        words = ", ".join(run.words for run in runs)
        side += "'s fused forward" if runs in fast else ""
        notes.note(STAGE, f"does company change the {side}?", f"no ({words})", True)
    return None


def not_aligned(trainer: Side, case: Case, notes: Notebook) -> Finding | None:
    """Whether the trainer recorded what its stock forward gives. Call outside of its mode.

    That forward's bits depend on the batch, so a part of them is enough, or values far nearer than the aligned ones.
    """
    found = trainer.stock(case.record)
    if found is None:
        return None
    mask, theirs = case.record.mask, case.trainer_logprobs
    if len(theirs) != len(found):
        return None

    def likeness(values: Float32Array) -> tuple[float, float]:
        apart = np.abs(values.astype(np.float64) - theirs)[mask]
        return float((bits(values) == bits(theirs))[mask].mean()), float(np.median(apart))

    stock, aligned = likeness(found), likeness(case.record.policy_logprobs)
    words = f"{stock[0]:.0%} of its tokens have the bits of the stock forward alone, {aligned[0]:.0%} the rollout's"
    same = stock[0] > max(_SOME_BITS, 2 * aligned[0]) or stock[1] * _MUCH_NEARER < aligned[1]
    notes.note(STAGE, f"is it the {trainer.name}'s stock forward?", words, False if same else None)
    if not same:
        return None
    sentence = (
        f"the {trainer.name} ran the architecture's stock forward (SDPA, ordinary operations), not the aligned one: "
        f"{words}"
    )
    return Finding(
        Cause.NUMERICS, "not aligned", "every operation", sentence, {"side": trainer.name, "equal": stock[0]}
    )


def _fused(rollout: Side, case: Case, place: Place | None, modules: Run, until: int, notes: Notebook) -> Finding | None:
    """Whether the rollout's own fast forward has the bits of the modules that it stands for."""
    if rollout.paths[0] != "fused":
        return None
    fast = runs_of(rollout, case, "fused", until)
    found = first_unequal(fast[0].trace(), modules.trace(), until)
    notes.note(STAGE, "is the fused forward that of its modules?", "yes" if found is None else
               f"no, from {found.tap} row {found.row} on", found is None)  # fmt: skip
    if found is None:
        return None
    layer = found.layer
    before = f"between layers.{layer - 1}.keys and {found.tap}" if layer else f"before {found.tap}"
    sentence = (
        f"the rollout's fused forward differs from the modules it stands for, {before}, first at row {found.row}: "
        "a kernel of it, or weights packed before the last update"
    )
    unequal_to_itself = unstable(fast, until)
    kind = "not invariant" if unequal_to_itself is not None else "fused forward"
    return Finding(Cause.NUMERICS, kind, found.tap, sentence, {"side": rollout.name, "row": found.row})


def _different(
    place: Place,
    ours: tuple[Run, ...],
    theirs: tuple[Run, ...],
    until: int,
    notes: Notebook,
    config: Mapping[str, Any],
    declared: tuple[str, ...],
) -> Finding:
    for runs in (theirs, ours):
        if _shaky(place, until, runs[:2]) is not None:
            side = runs[0].side.name
            notes.note(STAGE, "same bits twice?", f"not on the {side}'s side", False)
            sentence = f"the {side}'s {place.operation} {_depends(AGAIN)}, at {place.tap}, first at token {place.row}"
            return Finding(Cause.NUMERICS, "not invariant", place.tap, sentence, {"tap": place.tap, "side": side})
    verdict = judge(place, ours[0], theirs[0], until, config)
    names = {"left": ours[0].side.name, "right": theirs[0].side.name}
    notes.note(STAGE, "how far apart?", _distance(verdict), False)
    notes.note(STAGE, "which side agrees with float64?", _agreement(verdict, names), None)
    details = _details(place, verdict) | ({"manifest": list(declared)} if declared else {})
    where = f"at {place.tap}, first at token {place.row}"
    if verdict.fault:
        side = names[verdict.faulty]
        sentence = f"the {side} computes {place.operation} with {verdict.fault}, {where}"
        if not verdict.fault[0].islower() or verdict.fault.startswith(("the ", "every ", "not ", "no ", "rotated")):
            sentence = f"the {side}'s {place.operation} fits: {verdict.fault}; {where}"
        return Finding(Cause.NUMERICS, "wrong value", place.tap, sentence, details | {"side": side})
    if verdict.left_right is not None and verdict.left_right != verdict.right_right:
        side = names["right" if verdict.left_right else "left"]
        error = verdict.right_error if verdict.left_right else verdict.left_error
        sentence = f"the {side}'s {place.operation} is wrong by {error:.1e} of its size, {where}"
        return Finding(Cause.NUMERICS, "wrong value", place.tap, sentence, details | {"side": side})
    shaky = _shaky(place, until, theirs, ours)
    if shaky is not None:
        side, words = shaky
        notes.note(STAGE, "same bits in other company?", f"not on the {side}'s side ({words})", False)
        sentence = f"the {side}'s {place.operation} {_depends(words)}, {where}"
        return Finding(Cause.NUMERICS, "not invariant", place.tap, sentence, details | {"side": side})
    notes.note(STAGE, "same bits in other company?", "yes, on both sides", True)
    sentence = f"{place.operation} runs another kernel or another order of sums on the two sides, {where}"
    cut = _shaky(place, until, *((runs[0], *_shorter(runs[0], place)) for runs in (theirs, ours)))
    if cut is not None:
        notes.note(STAGE, "same bits without what follows?", f"not on the {cut[0]}'s side ({cut[1]})", False)
        sentence += f"; the {cut[0]}'s also depends on the length of the sequence"
    if declared:
        sentence += f" (their manifests say so: {declared[0].partition(' (')[0]})"
    return Finding(Cause.NUMERICS, "other kernel", place.tap, sentence, details)


def _shaky(place: Place, until: int, *sides: tuple[Run, ...]) -> tuple[str, str] | None:
    """The side whose bits at this tap are not the same in all of its runs."""
    inside = place.tap if place.layer is None else f"layers.{place.layer}."
    for runs in sides:
        base = runs[0].trace(within=inside)
        for other in runs[1:]:
            found = first_unequal(base, other.trace(within=inside), min(until, len(other.request.token_ids) - 1))
            if found is not None and found.tap == place.tap:
                return runs[0].side.name, f"{runs[0].words} against {other.words}"
    return None


def _shorter(run: Run, place: Place) -> list[Run]:
    """Causal rows do not depend on what follows: the same sequence cut after the row, and after a few rows."""
    ids = run.request.token_ids
    lengths = sorted({n for n in (place.row + 1, 1, 2, 3, 5, 7) if place.row < n < len(ids)})
    return [
        Run(
            run.side,
            dataclasses.replace(run.request, token_ids=ids[:n], logits_from=min(run.request.logits_from, n - 1)),
            f"cut to {n} tokens",
        )
        for n in lengths
    ]


def _not_invariant(
    found: tuple[Run, Run, Place], side: str, notes: Notebook, config: Mapping[str, Any], until: int
) -> Finding:
    base, other, place = found
    verdict = judge(place, base, other, until, config)
    words = f"{base.words} against {other.words}"
    notes.note(STAGE, f"does company change the {side}?", f"yes, at {place.tap} ({words})", False)
    notes.note(STAGE, "how far apart?", _distance(verdict), False)
    sentence = f"the {side}'s {place.operation} {_depends(words)}, at {place.tap}, row {place.row}"
    if verdict.left_right and verdict.right_right is False and AGAIN not in words:
        # Far more than another order of sums: it took in what is not its own.
        sentence += f"; there it is wrong by {verdict.right_error:.1e} of its size"
        if place.operation == "attention":
            sentence += ", so it reads keys that are not this row's: another sequence's, a pad's or another page's"
    return Finding(Cause.NUMERICS, "not invariant", place.tap, sentence, _details(place, verdict) | {"side": side})


def _depends(words: str) -> str:
    """``words`` name the two runs that do not agree."""
    if AGAIN in words:
        return "is not the same twice: it is random (dropout?) or a race"
    return f"depends on its company ({words})"


def _distance(verdict: Judgement) -> str:
    shape = list(verdict.shape)
    return f"row of {verdict.dtype} {shape}: {verdict.unequal} elements differ, by {verdict.max_ulp} ULP at most"


def _agreement(verdict: Judgement, names: Mapping[str, str]) -> str:
    if verdict.left_error is None or verdict.right_error is None:
        return "no reference for this operation"
    figures = f"relative error {verdict.left_error:.1e} ({names['left']}), {verdict.right_error:.1e} ({names['right']})"
    if verdict.left_right and verdict.right_right:
        return f"both, within rounding; {figures}"
    if not verdict.left_right and not verdict.right_right:
        return f"neither; {figures}"
    return f"only the {names['left' if verdict.left_right else 'right']}; {figures}"


def _details(place: Place, verdict: Judgement) -> dict[str, Any]:
    return {
        "tap": place.tap,
        "row": place.row,
        "rows": place.rows,
        "shape": list(verdict.shape),
        "dtype": verdict.dtype,
        "max_ulp": verdict.max_ulp,
        "unequal": verdict.unequal,
        "rollout_error": verdict.left_error,
        "trainer_error": verdict.right_error,
        "fault": verdict.fault,
    }
