"""Third question: do both sides mean the same by a log-prob?

From one and the same row of logits each usual reading gives its own bits. The reading whose bits are the recorded ones,
at every token, is what that side did; there is no tolerance in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollout.logprobs import policy_logprobs
from rollout.sampling import behavior_logprob, kept_tokens
from rollout.types import Float32Array, SamplingParams
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause, Finding

STAGE = "semantics"
_VISIBLE = 1e-2
"""nats; below it, arithmetic alone explains a difference"""
_NEARER = 10.0
_NO_IDS: npt.NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits of a sample and what is read from them. L tokens."""

    logits: torch.Tensor
    """[L, >= V] in the model's dtype; row i scores token i"""
    targets: torch.Tensor
    """int64 [L]"""
    temperature: float
    """float32 value, > 0"""
    vocab: int
    sampling: SamplingParams | None

    def plain(self, temperature: float | None = None) -> Float32Array:
        """The contract's log-probs, [L]."""
        value = self.temperature if temperature is None else temperature
        divisor = torch.full((len(self.targets),), value, dtype=torch.float32)
        return _array(policy_logprobs(self.logits, self.targets, divisor, self.vocab))

    def gather(self, rows: torch.Tensor) -> Float32Array:
        """[L, V] -> [L] float32 at the targets."""
        return _array(rows.gather(1, self.targets[:, None])[:, 0].float())

    @property
    def wide(self) -> torch.Tensor:
        """float32 [L, V]"""
        return self.logits[:, : self.vocab].float()


def _array(values: torch.Tensor) -> Float32Array:
    result: Float32Array = values.numpy()
    return result


@dataclass(frozen=True, slots=True)
class Reading:
    """One meaning of "log-prob"."""

    kind: str
    words: str
    compute: Callable[[Rows], Float32Array]


def _filtered(rows: Rows) -> Float32Array:
    assert rows.sampling is not None
    divisor = torch.full((len(rows.targets), 1), rows.temperature)
    whole = torch.log_softmax(rows.wide / divisor, -1).numpy()
    values = [
        behavior_logprob(np.float32(row[t]), row, kept_tokens(row, rows.sampling, _NO_IDS))
        for row, t in zip(whole, rows.targets.tolist(), strict=True)
    ]
    return np.array(values, np.float32)


def _rounded(dtype: torch.dtype) -> Callable[[Rows], Float32Array]:
    return lambda rows: rows.plain(float(torch.tensor(rows.temperature).to(dtype)))


def _tempered(rows: Rows) -> torch.Tensor:
    return rows.wide / torch.full((len(rows.targets), 1), rows.temperature)


def readings(rows: Rows) -> Iterator[Reading]:
    """Every reading but the contract's, simplest first."""
    if rows.temperature != 1.0:
        yield Reading("temperature", "the temperature was left out (raw log-probs)", lambda r: r.plain(1.0))
        for dtype in (torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            yield Reading("temperature", f"the temperature was rounded to {name}", _rounded(dtype))
        yield Reading(
            "temperature",
            "the logits were multiplied by the reciprocal of the temperature",
            lambda r: r.gather(torch.log_softmax(r.wide * torch.tensor(1.0 / r.temperature), -1)),
        )
        yield Reading(
            "temperature",
            "the temperature divided the log-probs, after the softmax",
            lambda r: r.gather(torch.log_softmax(r.wide, -1) / torch.tensor(r.temperature)),
        )
        yield Reading("temperature", "the temperature was applied twice", lambda r: _squared(r))
        yield Reading(
            "temperature",
            "the logits were divided by the temperature in their own dtype",
            lambda r: r.gather(torch.log_softmax((r.logits[:, : r.vocab] / r.temperature).float(), -1)),
        )
    if rows.sampling is not None and rows.sampling.filtered:
        yield Reading("filter", "log-probs of the filtered distribution (processed), not of the policy", _filtered)
    if rows.logits.size(1) > rows.vocab:
        yield Reading(
            "vocabulary padding",
            f"the softmax ran over {rows.logits.size(1)} columns, {rows.logits.size(1) - rows.vocab} of them padding",
            lambda r: _array(
                policy_logprobs(
                    r.logits, r.targets, torch.full((len(r.targets),), r.temperature), r.logits.size(1)
                )
            ),
        )  # fmt: skip
    yield Reading(
        "precision",
        "the log-softmax ran in bfloat16",
        lambda r: r.gather(torch.log_softmax(_tempered(r).bfloat16(), -1)),
    )
    yield Reading(
        "precision",
        "the logits were rounded to bfloat16",
        lambda r: r.gather(torch.log_softmax(r.wide.bfloat16().float() / _divisor(r), -1)),
    )
    yield Reading(
        "formula", "log of softmax instead of log_softmax", lambda r: r.gather(torch.softmax(_tempered(r), -1).log())
    )
    yield Reading(
        "formula",
        "logit minus logsumexp instead of log_softmax",
        lambda r: r.gather(_tempered(r)) - _array(_tempered(r).logsumexp(-1)),
    )
    yield Reading("formula", "log-softmax in float64", lambda r: r.gather(torch.log_softmax(_tempered(r).double(), -1)))
    yield Reading("sign", "the sign is turned (a loss, not a log-prob)", lambda r: -r.plain())
    yield Reading("units", "log-probs in base 2", lambda r: r.plain() / np.float32(np.log(2.0)))
    yield Reading("units", "probabilities, not their logarithms", lambda r: np.exp(r.plain()))


def _divisor(rows: Rows) -> torch.Tensor:
    return torch.full((len(rows.targets), 1), rows.temperature)


def _squared(rows: Rows) -> Float32Array:
    return rows.gather(torch.log_softmax(rows.wide / _divisor(rows) / _divisor(rows), -1))


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
        moved = Rows(rows.logits[there], rows.targets[here], rows.temperature, rows.vocab, rows.sampling)
        if _equal(values[here], moved.plain()):
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
    found = shifted(rows, values)
    if found is None:
        return None
    return dataclasses.replace(found, sentence=f"on the {side}'s side {found.sentence}")


def nearest(case: Case, rows: Rows, values: Float32Array, side: str) -> Finding | None:
    """For another engine's values, whose bits no reading here can give: the reading that is ten times nearer."""
    mask = case.record.mask
    wanted = values[mask].astype(np.float64)
    if not wanted.size or not np.isfinite(wanted).all():
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
