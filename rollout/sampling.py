"""C2: seeded sampling keyed on (seed, position, token id), as pure functions; also the only gate for parameters.

Score of token v at a row = float64(policy_logprob[v]) + Gumbel(hash(seed, position, v)); the draw is the argmax over
the kept ids, ties to the lowest id. ``position`` is the index of the last token fed (prompt included), so nothing of
batch, chunk, replica or resume enters. The hash is bit-compatible with SGLang's ``multinomial_with_seed`` (a
MurmurHash3 of seed, position and column, finished with length 16).

The functions here define the result, in plain Python and numpy; ``rollout.kernels.cpu.sampler`` computes the same fast.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest
from rollout.temperature import checked_temperature
from rollout.types import Float32Array, SamplingParams

MASK64 = 0xFFFFFFFFFFFFFFFF
MASK32 = 0xFFFFFFFF
HASH_MAX = 4294967295.0
LOG_CEILING = -(2.0**-32)
"""log(hash / HASH_MAX) is clamped below this, so the noise stays finite: at most -log(2**-32) = 22.18."""
LOG_FLOOR = -1.7976931348623157e308
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_ID = 2**31 - 1


# ---- parameters -------------------------------------------------------------------------------------------------


def _number(value: float, name: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} = {str(value)[:40]} is not a finite number", field=f"sampling.{name}")
    return number


def _whole(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} = {value!r} is not an integer", field=f"sampling.{name}")
    return value


def _ids(ids: tuple[int, ...], name: str, vocab_size: int | None) -> tuple[int, ...]:
    limit = MAX_ID if vocab_size is None else vocab_size - 1
    for i, token in enumerate(ids):
        if not 0 <= _whole(token, name) <= limit:
            raise InvalidRequest(f"{name}[{i}] = {token} is outside [0, {limit}]", field=f"sampling.{name}")
    return tuple(ids)


def validate_sampling(params: SamplingParams, *, vocab_size: int | None = None) -> SamplingParams:
    """Check every field and return the effective parameters: T as float32, top_k -1 as 0.

    Raises:
        InvalidRequest: with ``field`` = "sampling.<name>", the value and the allowed range.
    """

    def refuse(name: str, value: object, allowed: str) -> InvalidRequest:
        return InvalidRequest(f"{name} = {value!r} is outside {allowed}", field=f"sampling.{name}")

    temperature = checked_temperature(params.temperature, "sampling.temperature")
    top_k = _whole(params.top_k, "top_k")
    if top_k < -1 or top_k > MAX_ID:
        raise refuse("top_k", top_k, f"[-1, {MAX_ID}]; 0 or -1 is off")
    top_p = _number(params.top_p, "top_p")
    if not 0 < top_p <= 1:
        raise refuse("top_p", params.top_p, "(0, 1]; 1 is off")
    min_p = _number(params.min_p, "min_p")
    if not 0 <= min_p < 1:
        raise refuse("min_p", params.min_p, "[0, 1); 0 is off")
    if params.seed is not None and not -(2**63) <= _whole(params.seed, "seed") < 2**64:
        raise refuse("seed", params.seed, "[-2^63, 2^64)")
    if params.max_tokens is not None and not 1 <= _whole(params.max_tokens, "max_tokens") <= MAX_ID:
        raise refuse("max_tokens", params.max_tokens, f"[1, {MAX_ID}]; leave it unset for the context limit")
    _check_stop_strings(params.stop)
    barred = _ids(params.barred_token_ids, "barred_token_ids", vocab_size)
    if vocab_size is not None and len(set(barred)) >= vocab_size:
        raise InvalidRequest("barred_token_ids bars every token", field="sampling.barred_token_ids")
    return dataclasses.replace(
        params,
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        stop_token_ids=_ids(params.stop_token_ids, "stop_token_ids", vocab_size),
        barred_token_ids=tuple(sorted(set(barred))),
    )


def _check_stop_strings(stop: Collection[Any]) -> None:
    if isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
        raise InvalidRequest(f"stop = {stop!r:.60} must be a list of strings", field="sampling.stop")
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{len(stop)} stop strings; at most {MAX_STOP_STRINGS}", field="sampling.stop")
    for i, text in enumerate(stop):
        if not text or len(text) > MAX_STOP_STRING_CHARS:
            raise InvalidRequest(
                f"stop[{i}] has {len(text)} characters; allowed are 1 to {MAX_STOP_STRING_CHARS}", field="sampling.stop"
            )


# ---- seeds ------------------------------------------------------------------------------------------------------


def draw_seed() -> int:
    """A fresh 63-bit seed for a request that gave none; the service returns it."""
    return secrets.randbits(63)


def sample_seed(seed: int, sample_index: int) -> int:
    """Seed of sample i of a request, as an unsigned 64-bit integer.

    i = 0: the seed itself. i > 0: SplitMix64's output function (Steele et al. 2014) at state seed + i * golden gamma,
    so siblings differ and sample i does not depend on n.
    """
    state = (seed + sample_index * 0x9E3779B97F4A7C15) & MASK64
    if sample_index == 0:
        return state
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
    return state ^ (state >> 31)


# ---- hash and noise ---------------------------------------------------------------------------------------------


def _mix(h: int, k: int) -> int:
    k = (k * 0xCC9E2D51) & MASK32
    k = ((k << 15) | (k >> 17)) & MASK32
    k = (k * 0x1B873593) & MASK32
    h ^= k
    h = ((h << 13) | (h >> 19)) & MASK32
    return (h * 5 + 0xE6546B64) & MASK32


def row_state(seed: int, position: int) -> int:
    """Hash state after seed (unsigned 64-bit) and position; shared by all columns of a row."""
    h = _mix(_mix(0, seed & MASK32), (seed >> 32) & MASK32)
    return _mix(h, position & MASK32)


def column_hash(seed: int, position: int, column: int) -> int:
    """32-bit hash of (seed, position, token id); SGLang ``murmur_hash32``."""
    h = _mix(row_state(seed, position), column) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK32
    return h ^ (h >> 16)


def gumbel(hashed: int) -> float:
    """Standard Gumbel noise of a 32-bit hash, float64, finite for every hash: in [-709.8, 22.18]."""
    x = hashed / HASH_MAX
    log_x = math.log(x) if x > 0.0 else -math.inf
    return -math.log(-min(max(log_x, LOG_FLOOR), LOG_CEILING))


def draw(logprobs: Float32Array, keep: npt.NDArray[np.bool_] | None, seed: int, position: int) -> int:
    """The sampled token id: argmax of float64(logprob) + noise over kept ids, lowest id on ties. Defines C2.

    Args:
        logprobs: [V] policy log-probs. keep: [V] or None for all. seed: from ``sample_seed``.
    """
    best, best_score = -1, -math.inf
    for token in range(len(logprobs)) if keep is None else np.flatnonzero(keep).tolist():
        score = float(logprobs[token]) + gumbel(column_hash(seed, position, token))
        if score > best_score:
            best, best_score = token, score
    return best


# ---- filters ----------------------------------------------------------------------------------------------------


NUCLEUS_SLACK = 1.0 - 2.0**-20
"""Half of four equal tokens is two: a sum that misses top_p by rounding alone has reached it."""


def relative_mass(logprobs: Float32Array, keep: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Largest kept log-prob, and the kept probability divided by that token's, float64.

    Summed over the kept ids in order; where fewer are dropped than kept and the rest is more than half, as 1 less the
    dropped ones. (Relative, since at a low temperature all that is kept may lie below what float64 holds.)
    """
    kept, dropped = np.flatnonzero(keep), np.flatnonzero(~keep)
    top = float(logprobs[kept].max())
    if len(dropped) < len(kept):
        rest = 1.0
        for value in logprobs[dropped].tolist():
            rest -= math.exp(value)
        if rest > 0.5:
            return top, rest / math.exp(top)
    mass = 0.0
    for value in logprobs[kept].tolist():
        mass += math.exp(value - top)
    return top, mass


def kept_tokens(logprobs: Float32Array, params: SamplingParams, barred: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which ids survive: barring, then top-k, then top-p on the renormalised rest, then min-p relative to the largest.

    Order of tokens: by log-prob, highest first; equal log-probs by id, lowest first. top-p keeps a token while the
    mass before it, added up in that order, is below top_p times ``relative_mass`` by more than the rounding of float32
    log-probs (``NUCLEUS_SLACK``), so at least one token always stays.

    Args:
        logprobs: [V] policy log-probs without NaN. barred: ids never to be sampled.

    Returns:
        bool [V].
    """
    keep = np.ones(len(logprobs), np.bool_)
    keep[barred] = False
    if not keep.any() or not (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0):
        return keep
    ids = np.flatnonzero(keep)
    ids = ids[np.argsort(-logprobs[ids], kind="stable")]
    if params.top_k > 0:
        ids = ids[: params.top_k]
        keep = _mask(ids, len(logprobs))
    if params.top_p < 1.0:
        top, total = relative_mass(logprobs, keep)
        before, count = 0.0, 0
        for value in logprobs[ids].tolist():
            if not before < params.top_p * total * NUCLEUS_SLACK:
                break
            before += math.exp(value - top)
            count += 1
        ids = ids[: max(count, 1)]
    if params.min_p > 0.0:
        floor = float(logprobs[ids[0]]) + math.log(params.min_p)
        ids = ids[logprobs[ids].astype(np.float64) >= floor]
    return _mask(ids, len(logprobs))


def _mask(ids: npt.NDArray[np.int64], vocab: int) -> npt.NDArray[np.bool_]:
    keep = np.zeros(vocab, np.bool_)
    keep[ids] = True
    return keep


def behavior_logprob(policy: np.float32, logprobs: Float32Array, keep: npt.NDArray[np.bool_] | None) -> np.float32:
    """Log-prob under the distribution sampled from: policy - log(kept mass); the same bits when nothing was dropped."""
    if keep is None or bool(keep.all()):
        return policy
    top, mass = relative_mass(logprobs, keep)
    # Rounding must not pass probability 1.
    return np.float32(min(float(policy) - (top + math.log(mass)), 0.0))
