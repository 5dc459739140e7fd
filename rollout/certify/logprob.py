"""Family: the log-prob function as the engine's sampler answers it and as the training forward computes it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from rollout.certify.served import Served, drawn_row, given_row, serve
from rollout.certify.subject import Family, Outcome, Subject, compare
from rollout.logprobs import effective_temperature, policy_logprob_rows, policy_logprobs, row_digests
from rollout.sampling import behavior_logprob, kept_tokens
from rollout.types import SamplingParams

_ROWS = 66
_TEMPERATURES = (1.0, 0.7, 1.3, 0.1)
_MOST_ERROR = 2e-6
"""Relative to the largest log-prob of the row, against float64."""
_ASKED = (
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9),
    SamplingParams(temperature=0.7, min_p=0.05, barred_token_ids=(0, 1)),
)
"""One after the other, so that every row has company that asks for something else."""


def _inputs(subject: Subject) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vocab = subject.spec.vocab_size
    logits = 3 * subject.random(50, _ROWS, vocab)
    targets = torch.randint(0, vocab, (_ROWS,), generator=subject.generator(51)).to(logits.device)
    given = [effective_temperature(_TEMPERATURES[i % len(_TEMPERATURES)]) for i in range(_ROWS)]
    return logits, targets, torch.tensor(given, dtype=torch.float32)


@torch.no_grad()
def _checks(subject: Subject) -> Iterator[Outcome]:
    logits, targets, temperatures = _inputs(subject)
    vocab = subject.spec.vocab_size
    with subject.kernels.invariant_mode():
        trained = policy_logprobs(logits, targets, temperatures, vocab)
        for size in (1, 2, 64):
            parts = [
                policy_logprob_rows(logits[i : i + size], temperatures[i : i + size], vocab)
                for i in range(0, _ROWS, size)
            ]
            sliced = torch.cat(parts).gather(1, targets[:, None])[:, 0]
            yield compare(f"rows in slices of {size} against training in one", sliced, trained)
        padded = torch.cat((logits, logits.new_full((_ROWS, 13), 1e4)), 1)
        yield compare(
            "columns beyond the vocabulary", policy_logprobs(padded, targets, temperatures, vocab), trained
        )  # fmt: skip
        alone = torch.from_numpy(row_digests(logits[3:4], vocab).view("int64"))
        whole = torch.from_numpy(row_digests(padded, vocab).view("int64"))
        yield compare("row digest alone and in company", alone, whole[3:4])
        yield from _scored(subject, logits, padded, targets, trained)
        yield from _drawn(subject, logits, padded)
    scaled = logits.cpu().double() / temperatures.double()[:, None]
    exact = torch.log_softmax(scaled, -1).gather(1, targets.cpu()[:, None])[:, 0]
    error = float(((trained.cpu().double() - exact) / exact).abs().max())
    yield Outcome("against float64", _ROWS, int(not error <= _MOST_ERROR), f"largest relative error {error:.1e}")


def _scored(
    subject: Subject, logits: torch.Tensor, padded: torch.Tensor, targets: torch.Tensor, trained: torch.Tensor
) -> Iterator[Outcome]:
    """Score: the engine's sampler is given the tokens."""
    rows = [given_row(t, _TEMPERATURES[i % len(_TEMPERATURES)]) for i, t in enumerate(targets.tolist())]
    for size in (1, 2, _ROWS):
        parts = [serve(subject, logits[i : i + size], rows[i : i + size]) for i in range(0, _ROWS, size)]
        got = torch.cat([part.policy for part in parts])
        yield compare(f"served scores, {size} rows at a time, against training", got, trained)
    yield compare("served scores, columns beyond the vocabulary", serve(subject, padded, rows).policy, trained)


def _drawn(subject: Subject, logits: torch.Tensor, padded: torch.Tensor) -> Iterator[Outcome]:
    """Generate: drawn tokens, with neighbours that ask for other things, and each alone."""
    vocab = subject.spec.vocab_size
    asked = [_ASKED[i % len(_ASKED)] for i in range(_ROWS)]
    rows = [drawn_row(params, 977 * i) for i, params in enumerate(asked)]
    got = serve(subject, logits, rows)
    given = torch.tensor([effective_temperature(p.temperature) for p in asked], dtype=torch.float32)
    whole = policy_logprob_rows(logits, given, vocab)
    yield compare(
        "served policy log-probs against training",
        got.policy,
        whole.gather(1, got.tokens.to(whole.device)[:, None])[:, 0],
    )
    wanted = _behavior(whole.cpu().numpy(), got, asked)
    yield compare("served behavior log-probs against their definition", got.behavior, torch.from_numpy(wanted))
    alone = [serve(subject, logits[i : i + 1], rows[i : i + 1]) for i in range(_ROWS)]
    wide = serve(subject, padded, rows)
    for name in ("tokens", "policy", "behavior"):
        ours = getattr(got, name)
        yield compare(f"served {name} alone and in company", torch.cat([getattr(a, name) for a in alone]), ours)
        yield compare(f"served {name}, columns beyond the vocabulary", getattr(wide, name), ours)


def _behavior(whole: npt.NDArray[np.float32], got: Served, asked: list[SamplingParams]) -> npt.NDArray[np.float32]:
    values = []
    for row, token, params in zip(whole, got.tokens.tolist(), asked, strict=True):
        keep = kept_tokens(row, params, np.array(params.barred_token_ids, np.int64)) if params.filtered else None
        values.append(behavior_logprob(np.float32(row[token]), row, keep))
    return np.array(values, np.float32)


@torch.no_grad()
def _control(subject: Subject) -> Outcome:
    """Temperatures rounded to bfloat16 on the side that serves."""
    logits, targets, temperatures = _inputs(subject)
    rounded = temperatures.bfloat16().float().tolist()
    with subject.kernels.invariant_mode():
        rows = [given_row(t, value) for t, value in zip(targets.tolist(), rounded, strict=True)]
        trained = policy_logprobs(logits, targets, temperatures, subject.spec.vocab_size)
        return compare("temperature through bfloat16", serve(subject, logits, rows).policy, trained.cpu())


FAMILY = Family("logprob", "log-probs as served and as trained", _checks, _control)
