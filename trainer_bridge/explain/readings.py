"""Everything that people have meant by "log-prob" other than the contract's: each gives bits of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from rollout.sampling import behavior_logprob, kept_tokens
from rollout.types import Float32Array, SamplingParams
from trainer_bridge.explain.rows import Rows, array

_SMALLER = (torch.bfloat16, torch.float16)
_TEMPERATURES = tuple(round(0.05 * i, 2) for i in range(1, 41))
_DEFAULT_FILTERS = (
    {"top_k": 20}, {"top_k": 50}, {"top_p": 0.8}, {"top_p": 0.9}, {"top_p": 0.95},
    {"top_k": 20, "top_p": 0.8}, {"top_k": 20, "top_p": 0.95}, {"top_k": 50, "top_p": 0.95},
)  # fmt: skip
"""What checkpoints ship in generation_config.json and engines fill in by themselves."""
_PENALTIES = (1.05, 1.1, 1.2, 1.3)
_DECIMALS = (2, 3, 4, 5, 6)


@dataclass(frozen=True, slots=True)
class Reading:
    """One meaning of "log-prob"."""

    kind: str
    words: str
    compute: Callable[[Rows], Float32Array]


def readings(rows: Rows) -> Iterator[Reading]:
    """Every reading but the contract's, simplest first."""
    if rows.temperature != 1.0:
        yield from _temperatures()
    yield from _filters(rows)
    yield from _columns(rows)
    yield from _precisions()
    yield from _formulas()
    yield from _units()
    yield from _other_temperatures(rows)
    yield from _unasked(rows)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- temperature ------------------------------------------------------------------------------------------------


def _temperatures() -> Iterator[Reading]:
    def named(words: str, compute: Callable[[Rows], Float32Array]) -> Reading:
        return Reading("temperature", words, compute)

    yield named("the temperature was left out (raw log-probs)", lambda r: r.plain(1.0))
    for dtype in _SMALLER:
        yield named(f"the temperature was rounded to {_name(dtype)}", partial(_rounded_temperature, dtype=dtype))
    yield named(
        "the logits were multiplied by the reciprocal of the temperature",
        lambda r: r.gather(torch.log_softmax(r.wide * torch.tensor(1.0 / r.temperature), -1)),
    )
    yield named(
        "the logits were multiplied by the temperature",
        lambda r: r.gather(torch.log_softmax(r.wide * torch.tensor(r.temperature), -1)),
    )
    yield named(
        "the temperature divided the log-probs, after the softmax",
        lambda r: r.gather(torch.log_softmax(r.wide, -1) / torch.tensor(r.temperature)),
    )
    yield named(
        "the temperature was applied twice", lambda r: r.gather(torch.log_softmax(r.tempered / r.divisor, -1))
    )  # fmt: skip
    yield named(
        "the logits were divided by the temperature in their own dtype",
        lambda r: r.gather(torch.log_softmax((r.logits[:, : r.vocab] / r.temperature).float(), -1)),
    )


def _rounded_temperature(rows: Rows, *, dtype: torch.dtype) -> Float32Array:
    return rows.plain(float(torch.tensor(rows.temperature).to(dtype)))


def _other_temperatures(rows: Rows) -> Iterator[Reading]:
    for value in _TEMPERATURES:
        if np.float32(value) != np.float32(rows.temperature) and value != 1.0:
            words = f"the temperature was {value:g}, not {rows.temperature:g}"
            yield Reading("temperature", words, partial(Rows.plain, temperature=float(np.float32(value))))


# ---- filters and columns ----------------------------------------------------------------------------------------


def _filters(rows: Rows) -> Iterator[Reading]:
    if rows.sampling is not None and rows.sampling.filtered:
        yield Reading("filter", "log-probs of the filtered distribution (processed), not of the policy", filtered)


def _unasked(rows: Rows) -> Iterator[Reading]:
    """Filters and penalties that the request did not ask for."""
    if rows.sampling is None or not rows.sampling.filtered:
        for fields in _DEFAULT_FILTERS:
            shown = ", ".join(f"{key} = {value:g}" for key, value in fields.items())
            words = f"log-probs after a filter that the request did not ask for ({shown})"
            yield Reading("filter", words, partial(filtered, sampling=SamplingParams(**fields)))
    for penalty in _PENALTIES if rows.prompt else ():
        words = f"a repetition penalty of {penalty:g}, which the request did not ask for"
        yield Reading("filter", words, partial(_penalised, penalty=penalty))


def filtered(rows: Rows, sampling: SamplingParams | None = None) -> Float32Array:
    """Log-probs after the filters."""
    params = sampling or rows.sampling
    assert params is not None
    whole = torch.log_softmax(rows.tempered, -1).numpy()
    barred = np.array(sorted(params.barred_token_ids), np.int64)
    values = [
        behavior_logprob(np.float32(row[t]), row, kept_tokens(row, params, barred))
        for row, t in zip(whole, rows.targets.tolist(), strict=True)
    ]
    return np.array(values, np.float32)


def _penalised(rows: Rows, *, penalty: float) -> Float32Array:
    """Logits of ids seen so far divided by the penalty where positive, else multiplied, before the temperature."""
    wide = rows.wide.clone()
    for i, row in enumerate(wide):
        seen = torch.tensor(sorted({*rows.prompt, *rows.targets[:i].tolist()}))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    return rows.gather(torch.log_softmax(wide / rows.divisor, -1))


def _columns(rows: Rows) -> Iterator[Reading]:
    width = rows.logits.size(1)
    if width > rows.vocab:
        yield Reading(
            "vocabulary padding",
            f"the softmax ran over {width} columns, {width - rows.vocab} of them padding",
            partial(Rows.plain, vocab=width),
        )


def narrowed(rows: Rows, values: Float32Array) -> Reading | None:
    """A softmax over the first columns only, such as over the tokenizer's ids: how many, from the mass that is left."""
    whole = torch.softmax(rows.tempered.double(), -1)
    mass = np.exp(rows.plain().astype(np.float64) - values.astype(np.float64))
    # The row with the largest share outside tells the number best.
    row = int(np.argmin(np.where(np.isfinite(mass), mass, np.inf)))
    if not 0 < mass[row] < 1 - 1e-5:
        return None
    guess = int(torch.searchsorted(whole[row].cumsum(0), torch.tensor(float(mass[row]))))
    for count in range(max(guess - 2, int(rows.targets.max()) + 1, 1), min(guess + 5, rows.vocab)):
        if np.array_equal(rows.plain(vocab=count).view(np.uint32), values.view(np.uint32)):
            words = f"the softmax ran over the first {count} columns, not over the model's {rows.vocab}"
            return Reading("vocabulary padding", words, partial(Rows.plain, vocab=count))
    return None


# ---- precision, formula, units ----------------------------------------------------------------------------------


def _precisions() -> Iterator[Reading]:
    for dtype in _SMALLER:
        name = _name(dtype)
        yield Reading("precision", f"the log-softmax ran in {name}", partial(_softmax_in, dtype=dtype))
        yield Reading("precision", f"the logits were rounded to {name}", partial(_rounded_logits, dtype=dtype))
        yield Reading("precision", f"the log-probs were rounded to {name}", partial(_rounded_result, dtype=dtype))
    for digits in _DECIMALS:
        yield Reading(
            "precision", f"the log-probs were rounded to {digits} decimals", partial(_decimals, digits=digits)
        )
    yield Reading("precision", "log-softmax in float64", lambda r: r.gather(torch.log_softmax(r.tempered.double(), -1)))


def _softmax_in(rows: Rows, *, dtype: torch.dtype) -> Float32Array:
    return rows.gather(torch.log_softmax(rows.tempered.to(dtype), -1))


def _rounded_logits(rows: Rows, *, dtype: torch.dtype) -> Float32Array:
    return rows.gather(torch.log_softmax(rows.wide.to(dtype).float() / rows.divisor, -1))


def _rounded_result(rows: Rows, *, dtype: torch.dtype) -> Float32Array:
    return array(torch.from_numpy(rows.plain()).to(dtype).float())


def _decimals(rows: Rows, *, digits: int) -> Float32Array:
    rounded: Float32Array = np.round(rows.plain().astype(np.float64), digits).astype(np.float32)
    return rounded


def _formulas() -> Iterator[Reading]:
    yield Reading(
        "formula", "log of softmax instead of log_softmax", lambda r: r.gather(torch.softmax(r.tempered, -1).log())
    )
    yield Reading(
        "formula",
        "logit minus logsumexp instead of log_softmax",
        lambda r: r.gather(r.tempered) - array(r.tempered.logsumexp(-1)),
    )
    yield Reading("formula", "the logit itself, without a softmax", lambda r: r.gather(r.wide))
    yield Reading("formula", "the logit over the temperature, without a softmax", lambda r: r.gather(r.tempered))
    yield Reading("formula", "the log-prob of the likeliest token, not of the sampled one", _likeliest)
    yield Reading("formula", "running sums, not one log-prob a token", _running)
    yield Reading("formula", "the entropy of the row, not a log-prob", _entropy)


def _likeliest(rows: Rows) -> Float32Array:
    likeliest = rows.wide.argmax(-1)
    return replace(rows, targets=likeliest).plain()


def _running(rows: Rows) -> Float32Array:
    sums: Float32Array = np.cumsum(rows.plain(), dtype=np.float32)
    return sums


def _entropy(rows: Rows) -> Float32Array:
    values = torch.log_softmax(rows.tempered, -1)
    return array(-(values.exp() * values).sum(-1))


def _units() -> Iterator[Reading]:
    yield Reading("sign", "the sign is turned (a loss, not a log-prob)", lambda r: -r.plain())
    yield Reading("units", "log-probs in base 2", lambda r: r.plain() / np.float32(np.log(2.0)))
    yield Reading("units", "log-probs in base 10", lambda r: r.plain() / np.float32(np.log(10.0)))
    yield Reading("units", "probabilities, not their logarithms", lambda r: np.exp(r.plain()))
