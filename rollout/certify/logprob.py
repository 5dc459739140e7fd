"""Family: the log-prob function as the sampler calls it and as the training forward calls it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.certify.subject import Family, Outcome, Subject, compare
from rollout.logprobs import effective_temperature, policy_logprob_rows, policy_logprobs, row_digests

_ROWS = 66
_TEMPERATURES = (1.0, 0.7, 1.3, 0.1)
_MOST_ERROR = 2e-6
"""Relative to the largest log-prob of the row, against float64."""


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
            sampled = torch.cat(parts).gather(1, targets[:, None])[:, 0]
            yield compare(f"sampler in slices of {size} against training in one", sampled, trained)
        padded = torch.cat((logits, logits.new_full((_ROWS, 13), 1e4)), 1)
        yield compare(
            "columns beyond the vocabulary", policy_logprobs(padded, targets, temperatures, vocab), trained
        )  # fmt: skip
        alone = torch.from_numpy(row_digests(logits[3:4], vocab).view("int64"))
        whole = torch.from_numpy(row_digests(padded, vocab).view("int64"))
        yield compare("row digest alone and in company", alone, whole[3:4])
    scaled = logits.cpu().double() / temperatures.double()[:, None]
    exact = torch.log_softmax(scaled, -1).gather(1, targets.cpu()[:, None])[:, 0]
    error = float(((trained.cpu().double() - exact) / exact).abs().max())
    yield Outcome("against float64", _ROWS, int(not error <= _MOST_ERROR), f"largest relative error {error:.1e}")


@torch.no_grad()
def _control(subject: Subject) -> Outcome:
    """Temperatures rounded to bfloat16 on one side."""
    logits, targets, temperatures = _inputs(subject)
    vocab = subject.spec.vocab_size
    with subject.kernels.invariant_mode():
        rounded = policy_logprobs(logits, targets, temperatures.bfloat16().float(), vocab)
        return compare("temperature through bfloat16", rounded, policy_logprobs(logits, targets, temperatures, vocab))


FAMILY = Family("logprob", "the log-prob function on both sides", _checks, _control)
