"""Second question: did both sides feed the same tokens at the same positions?

Where the trainer recorded what it fed, that is compared. Where it did not, its log-probs are: replays with the usual
mistakes (positions counted from the padding, a lost or doubled first token, a cut prompt) are tried until one gives
exactly the bits that it recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rollout.types import Float32Array, Int32Array
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause, Finding, Notebook

STAGE = "inputs"
_PADDED_WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def compare_fed(case: Case, notes: Notebook) -> Finding | None:
    """What the trainer says it fed, against the record."""
    fed = case.fed
    finding = None
    if fed.token_ids is None and len(case.trainer_logprobs) == len(case.generated):
        notes.note(STAGE, "same token ids?", "the trainer did not record what it fed", None)
    else:
        finding = _ids(case)
        notes.note(STAGE, "same token ids?", finding.sentence if finding else "all equal", finding is None)
    if finding is None and fed.positions is not None:
        finding = _positions(fed.positions)
        notes.note(STAGE, "same positions?", finding.sentence if finding else "0, 1, 2, ...", finding is None)
    return finding


def _ids(case: Case) -> Finding | None:
    ours = np.array((*case.prompt, *case.generated), np.int32)
    theirs = case.fed.token_ids
    if theirs is None:
        sentence = (
            f"the rollout generated {len(case.generated)} tokens, the trainer scored {len(case.trainer_logprobs)}"
        )
        return Finding(Cause.INPUTS, "length", f"token {len(case.trainer_logprobs)}", sentence)
    if np.array_equal(ours, theirs):
        return None
    kind, words = _how_ids_differ(ours, theirs, len(case.prompt))
    shortest = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:shortest] != theirs[:shortest])
    at = int(differ[0]) if differ.size else shortest
    return Finding(Cause.INPUTS, kind, f"position {at}", words, {"position": at})


def _how_ids_differ(ours: Int32Array, theirs: Int32Array, prompt: int) -> tuple[str, str]:
    extra = len(theirs) - len(ours)
    if extra > 0 and np.array_equal(theirs[extra:], ours):
        return "template", f"the trainer fed {extra} more token(s) in front, first id {int(theirs[0])}"
    if extra < 0 and np.array_equal(ours[-extra:], theirs):
        return "truncated", f"the trainer lacks the first {-extra} token(s)"
    if extra < 0 and np.array_equal(ours[: len(theirs)], theirs):
        return "truncated", f"the trainer lacks the last {-extra} token(s)"
    tail = len(ours) - prompt
    if extra and np.array_equal(ours[-tail:], theirs[-tail:]):
        return "template", f"the same answer after a prompt of {prompt + extra} tokens instead of {prompt}"
    count = int((ours[: len(theirs)] != theirs[: len(ours)]).sum())
    return "ids", f"{count} of {len(ours)} token ids differ: encoded again, or another template"


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


@dataclass(frozen=True, slots=True)
class Feed:
    """One way of feeding the sample."""

    token_ids: tuple[int, ...]
    """[S - 1] fed"""
    positions: tuple[int, ...] | None
    finding: Finding


def mistakes(case: Case, *, bos: int | None, pad: int | None) -> Iterator[Feed]:
    """The usual mistakes, likeliest first."""
    ids, size = case.fed_ids, len(case.fed_ids)

    def found(kind: str, words: str) -> Finding:
        return Finding(Cause.INPUTS, kind, "position 0", words)

    widths = [w - size for w in _PADDED_WIDTHS if w > size]
    widths += [w - len(case.prompt) for w in _PADDED_WIDTHS if w > len(case.prompt)]
    for offset in dict.fromkeys([1, 2, 3, 4, *sorted(widths)[:8]]):
        words = f"positions start at {offset}, not at 0: pads in front were counted"
        yield Feed(ids, tuple(range(offset, offset + size)), found("positions", words))
    if bos is not None:
        yield Feed((bos, *ids), None, found("template", f"one more token in front (id {bos})"))
    for cut in dict.fromkeys((1, 2, *(len(case.prompt) - w for w in _PADDED_WIDTHS if w < len(case.prompt)))):
        if 0 < cut < len(case.prompt):
            yield Feed(ids[cut:], None, found("truncated", f"the first {cut} token(s) of the prompt are missing"))
    if len(case.prompt) > 1:
        head, tail = ids[: case.start], ids[case.start + 1 :]
        yield Feed((*head, *tail), None, found("template", "the prompt's last token is missing"))
    for count in (1, 2, 3, 4) if pad is not None else ():
        assert pad is not None
        yield Feed((pad,) * count + ids, None, found("padding", f"{count} pad(s) in front were attended"))
    yield Feed(ids, (0,) * size, found("positions", "every token was fed at position 0"))


def guess(
    case: Case,
    score: Callable[[tuple[int, ...], tuple[int, ...] | None], Float32Array],
    notes: Notebook,
    *,
    bos: int | None,
    pad: int | None,
) -> Finding | None:
    """The mistake whose replay gives the recorded bits. ``score(fed ids, positions)`` -> [L] nats."""
    tried = 0
    wanted = case.trainer_logprobs[case.record.mask]
    for feed in mistakes(case, bos=bos, pad=pad):
        tried += 1
        got = score(feed.token_ids, feed.positions)[case.record.mask]
        if wanted.size and np.array_equal(got.view(np.uint32), wanted.view(np.uint32)):
            notes.note(STAGE, "does a usual mistake give the trainer's bits?", feed.finding.sentence, False)
            return feed.finding
    notes.note(STAGE, "does a usual mistake give the trainer's bits?", f"none of {tried}", True)
    return None
