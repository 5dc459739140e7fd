"""Usual ways of feeding a sample wrongly, as feeds that can be replayed, likeliest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause, Finding

_WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""To which batches are padded and prompts are cut."""
_CHUNKS = (8, 16, 24, 32, 64, 128, 256, 512, 1024, 2048)
"""At whose multiples a chunked prefill, or a cached prefix, ends."""
_MOST_EDGES = 16


@dataclass(frozen=True, slots=True)
class Feed:
    """One way of feeding the sample."""

    token_ids: tuple[int, ...]
    """[S - 1] fed"""
    positions: tuple[int, ...] | None
    finding: Finding


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known about a side without a replay."""

    bos: int | None
    pad: int | None
    near: bool
    """whether its values are close to the right ones: rotary positions that are all off by one number only round
    differently, any other mistake shows"""
    first: int
    """first token whose value is not the right one"""


def _found(kind: str, words: str, place: int = 0, **details: object) -> Finding:
    return Finding(Cause.INPUTS, kind, f"position {place}", words, dict(details))


def mistakes(case: Case, hints: Hints) -> Iterator[Feed]:
    """Feeds to try. One that leaves the rows before ``hints.first`` as they were cannot be told from a right one."""
    if hints.near:
        yield from _offsets(case)
    if hints.first == 0:
        yield from _template(case, hints)
        yield from _truncated(case)
        yield from _padded(case, hints)
    yield from _steps_in_positions(case, hints)
    if hints.first == 0:
        yield from _at_edges(case)
    if not hints.near:
        yield from _offsets(case)
    yield Feed(case.fed_ids, (0,) * len(case.fed_ids), _found("positions", "every token was fed at position 0"))


def _offsets(case: Case) -> Iterator[Feed]:
    ids, size, prompt = case.fed_ids, len(case.fed_ids), len(case.prompt)
    widths = [w - size for w in _WIDTHS if w > size] + [w - size - 1 for w in _WIDTHS if w > size + 1]
    widths += [w - prompt for w in _WIDTHS if w > prompt]
    for offset in dict.fromkeys([*range(1, 9), *sorted(widths)[:12], *range(9, 33)]):
        words = f"positions start at {offset}, not at 0: pads in front were counted"
        yield Feed(ids, tuple(range(offset, offset + size)), _found("positions", words, offset=offset))


def _template(case: Case, hints: Hints) -> Iterator[Feed]:
    ids = case.fed_ids
    if hints.bos is not None:
        words = f"one more token in front (id {hints.bos}, the first-token mark)"
        if case.prompt[0] == hints.bos:
            words = f"one more token in front: the first-token mark (id {hints.bos}) was added to a prompt that has it"
        yield Feed((hints.bos, *ids), None, _found("template", words))
        if case.prompt[0] == hints.bos and len(case.prompt) > 1:
            yield Feed(ids[1:], None, _found("template", f"the first-token mark (id {hints.bos}) is missing"))


def _truncated(case: Case) -> Iterator[Feed]:
    ids, prompt, answer = case.fed_ids, case.prompt, case.generated[:-1]
    size = len(prompt)
    for cut in dict.fromkeys((1, 2, *(size - w for w in _WIDTHS if w < size), *range(3, 9))):
        if 0 < cut < size:
            yield Feed(ids[cut:], None, _found("truncated", f"the first {cut} token(s) of the prompt are missing"))
    for cut in dict.fromkeys((1, *(size - w for w in _WIDTHS if w < size), 2, 3, 4)):
        if 0 < cut < size:
            words = f"the last {cut} token(s) of the prompt are missing (cut on the right)"
            kind = "truncated"
            if cut == 1:
                kind, words = "template", "the prompt's last token is missing"
            yield Feed((*prompt[: size - cut], *answer), None, _found(kind, words, size - cut))


def _padded(case: Case, hints: Hints) -> Iterator[Feed]:
    if hints.pad is None:
        return
    ids, size = case.fed_ids, len(case.fed_ids)
    widths = sorted(
        {w - size for w in _WIDTHS if w > size} | {w - len(case.prompt) for w in _WIDTHS if w > len(case.prompt)}
    )[:4]
    for count in dict.fromkeys((1, 2, 3, 4, *widths)):
        if count > 0:
            yield Feed((hints.pad,) * count + ids, None, _found("padding", f"{count} pad(s) in front were attended"))
    for count in (1, 2, 3, *(w - len(case.prompt) for w in _WIDTHS[:6] if w > len(case.prompt))):
        words = f"{count} pad(s) between prompt and answer were attended"
        between = (*case.prompt, *(hints.pad,) * count, *case.generated[:-1])
        yield Feed(between, None, _found("padding", words, len(case.prompt)))


def _steps_in_positions(case: Case, hints: Hints) -> Iterator[Feed]:
    """Right positions up to a place, from there on others: decoding, chunks, cached prefixes."""
    ids, size, prompt = case.fed_ids, len(case.fed_ids), len(case.prompt)
    later = [prompt - 1 + hints.first] if hints.first else []
    starts = [prompt, *later, prompt - 1]
    edges = _edges(case) if hints.first == 0 else []
    for start in dict.fromkeys([*starts, *edges]):
        if not 0 < start < size:
            continue
        what = "the generated tokens" if start == prompt else f"tokens from {start} on"
        for words, moved in (
            (f"positions of {what} start again at 0", 0),
            (f"positions of {what} are one too high", start + 1),
            (f"positions of {what} are one too low", start - 1),
        ):
            places = (*range(start), *range(moved, moved + size - start))
            yield Feed(ids, places, _found("positions", words, start, position=start))


def _edges(case: Case) -> list[int]:
    """Places in the prompt where a chunk, or a cached prefix, may have ended; the last ones first."""
    found = {n for chunk in _CHUNKS for n in range(chunk, len(case.prompt), chunk)}
    return sorted(found, reverse=True)[:_MOST_EDGES]


def _at_edges(case: Case) -> Iterator[Feed]:
    """One token lost or doubled where chunks meet."""
    ids, size = case.fed_ids, len(case.fed_ids)
    edges = _edges(case)
    for at in dict.fromkeys([*edges, *(n - 1 for n in edges)]):
        lost = (*ids[:at], *ids[at + 1 :])
        words = f"token {at} of the prompt was left out, as at the edge of a chunk"
        yield Feed(lost, None, _found("chunk edge", words, at, position=at))
        gap = (*range(at), *range(at + 1, size))
        yield Feed(lost, gap, _found("chunk edge", f"{words} (positions go on)", at, position=at))
        twice = (*ids[: at + 1], *ids[at:])
        words = f"token {at} of the prompt was fed twice, as at the edge of a chunk"
        yield Feed(twice, None, _found("chunk edge", words, at, position=at))
