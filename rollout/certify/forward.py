"""Family: the whole model with its real weights: decode, chunks and packed training, around page edges, in company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rollout.certify.steps import Rows, Steps, training_logits
from rollout.certify.subject import STRANGER_ROWS, Family, Outcome, Subject, compare

_DECODED = 3


def _pieces(length: int, chunk: int, decoded: int) -> list[tuple[int, int]]:
    """Ranges that cover [0, length): chunks, then single rows at the end."""
    prompt = length - decoded
    starts = list(range(0, prompt, chunk))
    return [(s, min(s + chunk, prompt)) for s in starts] + [(n, n + 1) for n in range(prompt, length)]


def _rollout(subject: Subject, ids: torch.Tensor, ranges: Sequence[tuple[int, int]], seed: int | None) -> torch.Tensor:
    steps = Steps(subject, [ids], seed=seed)
    return torch.cat([steps.run([Rows(0, first, last)])[0] for first, last in ranges])


def _lengths(subject: Subject) -> list[int]:
    page = subject.kernels.page_size
    wanted = [page - 1, page + page // 2 + 1]
    wanted += [1 + _DECODED, page + 1, 2 * page + 1, 3 * page] if subject.full else []
    return [n for n in wanted if _DECODED < n <= subject.spec.context_length]


@torch.no_grad()
def _checks(subject: Subject) -> Iterator[Outcome]:
    with subject.kernels.invariant_mode():
        sequences = [subject.token_ids(20 + i, n) for i, n in enumerate(_lengths(subject))]
        trained = training_logits(subject, sequences)
        for ids, wanted in zip(sequences, trained, strict=True):
            name = f"{len(ids)} tokens"
            yield compare(f"training alone, {name}", training_logits(subject, [ids])[0], wanted)
            for chunk in (9, 64, 256) if subject.full else (64,):
                ranges = _pieces(len(ids), chunk, _DECODED)
                got = _rollout(subject, ids, ranges, seed=chunk)
                yield compare(f"chunks of {chunk}, then decode, {name}", got, wanted)
        yield from _strangers(subject, sequences[-1], trained[-1])


def _strangers(subject: Subject, ids: torch.Tensor, wanted: torch.Tensor) -> Iterator[Outcome]:
    """The last row is decoded while another sequence is prefilled."""
    last = len(ids) - 1
    counts = [min(rows, subject.spec.context_length) for rows in STRANGER_ROWS]
    steps = Steps(subject, [ids, *(subject.token_ids(30 + n, n) for n in counts)], seed=4)
    steps.run([Rows(0, 0, last, wanted=False)])
    for stranger, count in enumerate(counts, 1):
        company = [Rows(0, last, last + 1), Rows(stranger, 0, count, wanted=False)]
        (logits,) = steps.run(company)
        yield compare(f"decode beside a prefill of {count} rows", logits, wanted[last:])


@torch.no_grad()
def _control(subject: Subject) -> Outcome:
    """Positions one too high, as a padded trainer without position ids feeds them: every other byte is right."""
    ids = subject.token_ids(20, min(17, subject.spec.context_length - 1))
    with subject.kernels.invariant_mode():
        wanted = training_logits(subject, [ids])[0]
        padded = torch.cat((ids[:1], ids))
        return compare("one pad in front, attended and counted", training_logits(subject, [padded])[0][1:], wanted)


FAMILY = Family("forward", "the whole model: decode, chunks, strangers, training", _checks, _control)
