"""Family: the fast sampler against the float64 definition of C2, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from rollout.certify.served import POSITION, drawn_row, serve
from rollout.certify.subject import Family, Outcome, Subject
from rollout.kernels.cpu.sampler import CpuSampler
from rollout.logprobs import effective_temperature, policy_logprob_rows
from rollout.sampling import draw, kept_tokens
from rollout.types import Float32Array, SamplingParams

_SPREADS = (0.01, 1.0, 6.0)
"""Deviation of the logits: flat, usual, peaked."""
_FILTERS: tuple[SamplingParams | None, ...] = (None, SamplingParams(top_k=40, top_p=0.9))
_SERVED = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=40),
    SamplingParams(temperature=1.3, top_p=0.8, barred_token_ids=(3,)),
)
_NO_IDS: npt.NDArray[np.int64] = np.empty(0, np.int64)
_QUICK_COLUMNS = 4096
"""The definition is plain Python; one row of the whole vocabulary is drawn by it in either case."""


def _row(subject: Subject, spread: float, columns: int) -> Float32Array:
    logits = spread * torch.randn(1, columns, generator=subject.generator(int(spread * 100)))
    rows: Float32Array = policy_logprob_rows(logits, torch.ones(1), columns).numpy()
    row: Float32Array = rows[0]
    return row


def _checks(subject: Subject) -> Iterator[Outcome]:
    fast, vocab = CpuSampler(), subject.spec.vocab_size
    for spread in _SPREADS:
        whole = subject.full or spread == 1.0
        row = _row(subject, spread, vocab if whole else min(vocab, _QUICK_COLUMNS))
        for params in _FILTERS:
            keep = None if params is None else kept_tokens(row, params, _NO_IDS)
            # Draws among the kept few cost the definition nothing, draws of a whole row seconds.
            draws = (16 if subject.full else 2) if keep is None else 64
            seeds = [(7 * i, 100 + i) for i in range(draws)]
            wrong = sum(fast.draw(row, keep, *at) != draw(row, keep, *at) for at in seeds)
            kind = "all tokens" if params is None else "top-k and top-p"
            yield Outcome(f"{kind} of {len(row)}, spread {spread}", draws, wrong)
    yield _served(subject)


@torch.no_grad()
def _served(subject: Subject) -> Outcome:
    """What the engine's sampler draws from logits, rows of all kinds side by side."""
    asked = _SERVED * (4 if subject.full else 1)
    logits = subject.random(60, len(asked), subject.spec.vocab_size)
    seeds = [7 + 1000 * i for i in range(len(asked))]
    with subject.kernels.invariant_mode():
        got = serve(subject, logits, [drawn_row(p, s) for p, s in zip(asked, seeds, strict=True)]).tokens.tolist()
        given = torch.tensor([effective_temperature(p.temperature) for p in asked], dtype=torch.float32)
        rows: Float32Array = policy_logprob_rows(logits, given, subject.spec.vocab_size).cpu().numpy()
    wanted = [
        draw(row, kept_tokens(row, p, np.array(p.barred_token_ids, np.int64)), seed, POSITION)
        for row, p, seed in zip(rows, asked, seeds, strict=True)
    ]
    wrong = sum(a != b for a, b in zip(got, wanted, strict=True))
    return Outcome(f"served draws of {len(asked)} unlike rows", len(asked), wrong)


def _control(subject: Subject) -> Outcome:
    """The same draws keyed on the next position."""
    fast = CpuSampler()
    row = _row(subject, 0.01, min(subject.spec.vocab_size, _QUICK_COLUMNS))
    wrong = sum(fast.draw(row, None, 7, 101 + i) != fast.draw(row, None, 7, 100 + i) for i in range(16))
    return Outcome("noise keyed one position later", 16, wrong)


FAMILY = Family("sampler", "draws against their float64 definition", _checks, _control)
