"""Second question: did both sides feed the same tokens at the same positions?

Where the trainer recorded what it fed, that is compared. Where it did not, its log-probs are: replays with the usual
mistakes (positions counted from the padding, a lost or doubled first token, a cut prompt) are tried until one gives
exactly the bits that it recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from rollout.errors import InvalidRequest
from rollout.logprobs import policy_logprob_rows
from rollout.types import Float32Array, Int32Array
from trainer_bridge.checks import Mask
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause, Finding, Notebook
from trainer_bridge.explain.mistakes import Hints, mistakes
from trainer_bridge.explain.rows import Rows

STAGE = "inputs"
_MOST_TRIED = 24
"""Ids of equal log-prob that are fed in turn, to see which one the next row follows from."""
_MOST_CHANGED = 8
"""Ids that are looked for before it is called another text."""


def compare_fed(case: Case, notes: Notebook, eos: frozenset[int] = frozenset()) -> Finding | None:
    """What the trainer says it fed, against the record."""
    fed = case.fed
    finding = None
    if fed.token_ids is None and len(case.trainer_logprobs) == len(case.generated):
        notes.note(STAGE, "same token ids?", "the trainer did not record what it fed", None)
    else:
        finding = _ids(case, eos)
        notes.note(STAGE, "same token ids?", finding.sentence if finding else "all equal", finding is None)
    if finding is None and fed.positions is not None:
        finding = _positions(fed.positions)
        notes.note(STAGE, "same positions?", finding.sentence if finding else "0, 1, 2, ...", finding is None)
    return finding


def _ids(case: Case, eos: frozenset[int]) -> Finding | None:
    ours = np.array((*case.prompt, *case.generated), np.int32)
    theirs = case.fed.token_ids
    if theirs is None:
        return _length(case, eos)
    if np.array_equal(ours, theirs):
        return None
    kind, words = _how_ids_differ(ours, theirs, len(case.prompt))
    shortest = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:shortest] != theirs[:shortest])
    at = int(differ[0]) if differ.size else shortest
    return Finding(Cause.INPUTS, kind, f"position {at}", words, {"position": at})


def _length(case: Case, eos: frozenset[int]) -> Finding:
    ours, theirs = len(case.generated), len(case.trainer_logprobs)
    sentence = f"the rollout generated {ours} tokens, the trainer scored {theirs}"
    if theirs == ours + 1:
        sentence += ": one more than was sampled, such as an EOS put at the end"
    elif theirs + 1 == ours and case.generated[-1] in eos:
        sentence += f": the sampled EOS (id {case.generated[-1]}) was dropped"
    elif theirs < ours:
        sentence += ": the answer was cut"
    return Finding(Cause.INPUTS, "length", f"token {min(ours, theirs)}", sentence)


def _how_ids_differ(ours: Int32Array, theirs: Int32Array, prompt: int) -> tuple[str, str]:
    extra = len(theirs) - len(ours)
    if extra > 0 and np.array_equal(theirs[extra:], ours):
        return "template", f"the trainer fed {extra} more token(s) in front, first id {int(theirs[0])}"
    if extra < 0 and np.array_equal(ours[-extra:], theirs):
        return "truncated", f"the trainer lacks the first {-extra} token(s)"
    if extra < 0 and np.array_equal(ours[: len(theirs)], theirs):
        return "truncated", f"the trainer lacks the last {-extra} token(s)"
    tail = len(ours) - prompt
    kept = prompt + extra
    if extra < 0 and kept > 0 and np.array_equal(ours[:kept], theirs[:kept]) and _ends_alike(ours, theirs, tail):
        return "truncated", f"the trainer lacks the last {-extra} token(s) of the prompt (cut on the right)"
    if extra and _ends_alike(ours, theirs, tail):
        return "template", f"the same answer after a prompt of {prompt + extra} tokens instead of {prompt}"
    count = int((ours[: len(theirs)] != theirs[: len(ours)]).sum())
    return "ids", f"{count} of {len(ours)} token ids differ: encoded again, or another template"


def _ends_alike(ours: Int32Array, theirs: Int32Array, tail: int) -> bool:
    return tail == 0 or np.array_equal(ours[-tail:], theirs[-tail:])


def _positions(positions: Int32Array) -> Finding | None:
    wanted = np.arange(len(positions), dtype=np.int32)
    if np.array_equal(positions, wanted):
        return None
    offset = int(positions[0])
    if np.array_equal(positions, wanted + offset):
        words = f"positions start at {offset}, not at 0: pads in front were counted"
        return Finding(Cause.INPUTS, "positions", "position 0", words, {"offset": offset})
    at = int(np.flatnonzero(positions != wanted)[0])
    words = f"positions go wrong at token {at}: {int(positions[at])} instead of {at}"
    return Finding(Cause.INPUTS, "positions", f"position {at}", words, {"position": at})


# ---- what was not recorded --------------------------------------------------------------------------------------


Score = Callable[[tuple[int, ...], tuple[int, ...] | None], Float32Array]
"""(fed ids, positions) -> [L] nats"""


def guess(
    case: Case, wanted: Float32Array, plain: Float32Array, score: Score, notes: Notebook, hints: Hints, side: str
) -> Finding | None:
    """The mistake whose replay gives a side's recorded bits.

    Args:
        wanted: [L] what it recorded. plain: [L] what its replay of the right inputs gives.
    """
    mask = case.record.mask
    question = f"does a usual mistake give the {side}'s bits?"
    tried = 0
    for feed in mistakes(case, hints):
        try:
            got = score(feed.token_ids, feed.positions)
        except InvalidRequest:  # longer than the context, or a pad id beyond the vocabulary
            continue
        tried += 1
        if _same(got[mask], wanted[mask]):
            notes.note(STAGE, question, feed.finding.sentence, False)
            sentence = f"on the {side}'s side {feed.finding.sentence}"
            return replace(feed.finding, sentence=sentence, details=feed.finding.details | {"side": side})
    notes.note(STAGE, question, f"none of {tried}", True)
    return None


def _same(a: Float32Array, b: Float32Array) -> bool:
    return a.size > 0 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def substituted(
    case: Case, wanted: Float32Array, rows: Rows, rescored: Callable[[tuple[int, ...]], Rows], side: str
) -> Finding | None:
    """Other ids in the answer than were recorded, as after text was encoded again: which, from the log-probs alone.

    The first value that is not the right one is then that of another id in the same row, bit for bit; other causes
    change the whole row, and hit one of its values by chance once in thousands of times.

    Args:
        rows: the side's logits of the record. rescored: its logits of the prompt and other generated ids.
    """
    ids, mask = list(case.generated), case.record.mask
    changed: list[int] = []
    known = True
    while known and len(changed) < _MOST_CHANGED:
        wrong = _wrong(rows, wanted, mask)
        if wrong is None:
            break
        found = _ids_with(rows, wrong, wanted[wrong])
        if not found or (changed and wrong <= changed[-1]):
            return None if not changed else _other_ids(case, changed, None, side)
        changed.append(wrong)
        known = False
        for candidate in found[:_MOST_TRIED]:
            ids[wrong] = candidate
            rows = rescored(tuple(ids))
            # A last token is scored, not fed: nothing behind it tells which of several it was.
            if (after := _wrong(rows, wanted, mask)) is None or after > wrong + 1:
                known = True
                break
            # The row behind it fits, and its own target is another one too.
            if after == wrong + 1 and len(found) == 1:
                known = True
    if not changed:
        return None
    return _other_ids(case, changed, ids[changed[0]] if known and _wrong(rows, wanted, mask) is None else None, side)


def _wrong(rows: Rows, wanted: Float32Array, mask: Mask) -> int | None:
    """First token of the model's whose value is not the recorded one."""
    wrong = np.flatnonzero(mask & (rows.plain().view(np.uint32) != wanted.view(np.uint32)))
    return int(wrong[0]) if wrong.size else None


def _other_ids(case: Case, changed: list[int], new: int | None, side: str) -> Finding:
    at = changed[0]
    position, old = len(case.prompt) + at, case.generated[at]
    other = f"id {new}" if new is not None else "another id"
    words = f"the {side} scored {other} at position {position}, where {old} was sampled"
    if len(changed) > 1:
        words += f"; {len(changed)} ids in all are others: encoded again?"
    return Finding(Cause.INPUTS, "ids", f"position {position}", words, {"position": position, "side": side})


def _ids_with(rows: Rows, at: int, value: np.float32) -> list[int]:
    """Ids whose log-prob in this row is this value, bit for bit; logits of a small type are often alike."""
    one = rows.cut(slice(at, at + 1), slice(at, at + 1))
    whole = policy_logprob_rows(one.logits, torch.tensor([rows.temperature]), rows.vocab)[0]
    return [int(i) for i in torch.nonzero(whole == float(value))[:, 0]]


def outside_vocabulary(case: Case, vocab: int) -> Finding | None:
    """Ids that the model has no column for: padding that was not masked out, or another model's tokenizer."""
    for name, ids, first in (("prompt", case.prompt, 0), ("answer", case.generated, len(case.prompt))):
        wrong = [i for i, token in enumerate(ids) if not 0 <= token < vocab]
        if not wrong:
            continue
        at = wrong[0]
        if name == "answer":
            words = (
                f"the rollout sampled id {ids[at]} at token {at}, beyond the model's {vocab} ids: columns of "
                "vocabulary padding were not masked out"
            )
            return Finding(Cause.SEMANTICS, "vocabulary padding", f"token {at}", words, {"id": ids[at]})
        words = f"the prompt holds id {ids[at]} at position {at}, beyond the model's {vocab} ids: another tokenizer"
        return Finding(Cause.INPUTS, "ids", f"position {first + at}", words, {"id": ids[at]})
    return None
