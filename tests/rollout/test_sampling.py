"""C2 as pure functions: parameters, seeds of siblings, filters, and the log-prob of what was sampled from."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout.errors import InvalidRequest
from rollout.sampling import (
    NUCLEUS_SLACK,
    behavior_logprob,
    draw,
    draw_seed,
    kept_tokens,
    sample_seed,
    validate_sampling,
)
from rollout.types import SamplingParams

NONE = np.empty(0, np.int64)


def row(*logits: float) -> npt.NDArray[np.float32]:
    values = np.array(logits, np.float64)
    return (values - np.log(np.exp(values - values.max()).sum()) - values.max()).astype(np.float32)


def kept(logprobs: npt.NDArray[np.float32], barred: tuple[int, ...] = (), **params: Any) -> list[int]:
    mask = kept_tokens(logprobs, SamplingParams(**params), np.array(barred, np.int64))
    assert mask.dtype == np.bool_ and mask.shape == logprobs.shape
    return np.flatnonzero(mask).tolist()


# ---- parameters -------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
REFUSED: list[tuple[str, Any]] = [
    *(("temperature", v) for v in (NAN, INF, -INF, -1.0, -1e-9, 1e-7, 1e39, True, "1", None)),
    *(("top_k", v) for v in (-2, 2**31, 1.0, True, NAN, None)),
    *(("top_p", v) for v in (0, 0.0, -0.1, 1.0000001, NAN, INF, True, None)),
    *(("min_p", v) for v in (-0.1, 1.0, 1, NAN, INF, True, None)),
    *(("seed", v) for v in (2**64, -(2**63) - 1, 1.0, True, NAN)),
    *(("max_tokens", v) for v in (0, -1, 2**31, 1.5, True, NAN)),
    *(("stop", v) for v in (("",), ("x" * 257,), ("x",) * 17)),
    *(("stop_token_ids", v) for v in ((-1,), (64,), (3, 2**31), (True,), (1.0,))),
    *(("barred_token_ids", v) for v in ((-1,), (64,), (3, 2**31), (True,), tuple(range(64)))),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda v: repr(v)[:30])
def test_refused_values_name_their_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_sampling(SamplingParams(**{name: value}), vocab_size=64)
    assert caught.value.field == f"sampling.{name}"
    assert name in caught.value.message


ACCEPTED: list[tuple[str, Any, Any]] = [
    ("temperature", 0, 0.0),
    ("temperature", 1, 1.0),
    ("temperature", 0.1, float(np.float32(0.1))),
    ("temperature", 2e-6, float(np.float32(2e-6))),
    ("temperature", 3.4e38, float(np.float32(3.4e38))),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("top_k", 2**31 - 1, 2**31 - 1),
    ("top_p", 5e-324, 5e-324),
    ("top_p", 1, 1.0),
    ("min_p", 0, 0.0),
    ("min_p", 0.999999, 0.999999),
    ("seed", None, None),
    ("seed", -(2**63), -(2**63)),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("max_tokens", 1, 1),
    ("stop", ("x" * 256,) * 16, ("x" * 256,) * 16),
    ("stop_token_ids", (0, 63), (0, 63)),
    ("barred_token_ids", (9, 3, 9), (3, 9)),
    ("barred_token_ids", tuple(range(63)), tuple(range(63))),
]


@pytest.mark.parametrize(("name", "value", "effective"), ACCEPTED, ids=lambda v: repr(v)[:30])
def test_effective_values(name: str, value: Any, effective: Any) -> None:
    result = validate_sampling(SamplingParams(**{name: value}), vocab_size=64)
    assert result == dataclasses.replace(SamplingParams(), **{name: effective})
    assert type(getattr(result, name)) is type(effective)
    assert validate_sampling(result, vocab_size=64) == result


def test_the_least_temperature_of_the_message_is_accepted() -> None:
    assert validate_sampling(SamplingParams(temperature=1e-6)).temperature == float(np.float32(1e-6))


def test_an_integer_beyond_float64_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        validate_sampling(SamplingParams(temperature=10**400))


def test_defaults_are_neutral() -> None:
    effective = validate_sampling(SamplingParams())
    assert effective == SamplingParams()
    assert not effective.filtered and not effective.greedy
    assert kept(row(1, 2, 3)) == [0, 1, 2]


# ---- seeds (D1, D2) ---------------------------------------------------------------------------------------------


def splitmix64(state: int) -> int:
    """The published SplitMix64 step output, written with arithmetic instead of masks."""
    z = (state ^ state // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z // 2**27) * 0x94D049BB133111EB % 2**64
    return z ^ z // 2**31


def test_the_reference_is_splitmix64() -> None:
    # First outputs for seed 1234567, as published with the reference implementation.
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64((1234567 + i * gamma) % 2**64) for i in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("seed", [0, 1, 1234567, 2**63, 2**64 - 1, -1, -(2**63)])
def test_sample_seed(seed: int) -> None:
    assert sample_seed(seed, 0) == seed % 2**64
    expected = [splitmix64((seed + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(1, 40)]
    assert [sample_seed(seed, i) for i in range(1, 40)] == expected
    assert len({seed % 2**64, *expected}) == 40


def test_siblings_of_neighbouring_seeds_do_not_meet() -> None:
    """A sum of seed and index, the naive mix, makes sample 1 of seed 0 sample 0 of seed 1."""
    assert len({sample_seed(s, i) for s in range(64) for i in range(64)}) == 64 * 64
    assert len({s + i for s in range(64) for i in range(64)}) < 64 * 64


def test_siblings_differ_and_do_not_depend_on_n() -> None:
    flat = row(*np.linspace(0, 1, 64))

    def group(n: int, start: int = 0) -> list[list[int]]:
        return [[draw(flat, None, sample_seed(5, i), t) for t in range(6)] for i in range(start, start + n)]

    eight = group(8)
    assert len({tuple(s) for s in eight}) == 8
    assert eight[:3] == group(3)
    assert eight == [group(1, i)[0] for i in range(8)]


def test_drawn_seeds_are_fresh_and_servable() -> None:
    seeds = [draw_seed() for _ in range(64)]
    assert len(set(seeds)) == 64
    assert all(validate_sampling(SamplingParams(seed=s)).seed == s for s in seeds)


# ---- filters ----------------------------------------------------------------------------------------------------


def test_top_k_breaks_ties_by_lowest_id() -> None:
    tied = row(0, 1, 1, 1, 2)
    assert [kept(tied, top_k=k) for k in range(6)] == [
        [0, 1, 2, 3, 4], [4], [1, 4], [1, 2, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4],
    ]  # fmt: skip
    assert kept(tied, top_k=2) != sorted(np.argsort(-tied[::-1], kind="stable")[:2].tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # Powers of two, so that the masses are exact: 1/2, 1/4, 1/8, 1/8.
    exact = np.log(np.array([0.125, 0.5, 0.125, 0.25])).astype(np.float32)
    assert kept(exact, top_p=1e-9) == [1]
    assert kept(exact, top_p=0.4999) == [1]
    assert kept(exact, top_p=0.7) == [1, 3]
    assert kept(exact, top_p=0.8) == [0, 1, 3]
    assert kept(exact, top_p=0.9) == [0, 1, 2, 3]
    assert kept(row(0, 0, 0, 0), top_p=0.5) == [0, 1]


def test_min_p_is_relative_to_the_largest() -> None:
    exact = np.log(np.array([0.125, 0.5, 0.125, 0.25])).astype(np.float32)
    assert kept(exact, min_p=0.24) == [0, 1, 2, 3]
    assert kept(exact, min_p=0.26) == [1, 3]
    assert kept(exact, min_p=0.51) == [1]
    assert kept(row(0, 0), min_p=0.999) == [0, 1]


def test_filters_apply_in_order() -> None:
    """Barring first, top-k next, top-p on the renormalised rest, min-p last."""
    exact = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])).astype(np.float32)
    assert kept(exact, (0,), top_k=2) == [1, 2]
    # Of the kept 3/4 the first token holds two thirds: renormalised, it alone reaches 0.6.
    assert kept(exact, top_k=2, top_p=0.6) == [0]
    assert kept(exact, top_p=0.6) == [0, 1]
    # With id 0 barred, the largest is id 1.
    assert kept(exact, (0,), min_p=0.45) == [1, 2]
    assert kept(exact, min_p=0.45) == [0, 1]


def test_barred_ids_never_stay() -> None:
    flat = row(3, 2, 1)
    assert kept(flat, (0, 2)) == [1]
    assert kept(flat, (0,), top_k=1) == [1]
    assert kept(flat, (0, 1, 2)) == []


def test_nothing_left_is_an_empty_set_under_every_filter() -> None:
    assert kept(row(3, 2, 1), (0, 1, 2), top_k=2, top_p=0.5, min_p=0.1) == []


def test_top_p_where_every_kept_mass_underflows() -> None:
    cold = np.array([0.0, -1000.0, -1001.0, -1010.0], np.float32)
    assert kept(cold, (0,), top_k=2) == [1, 2]
    assert 1 in kept(cold, (0,), top_p=0.5)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12),
    st.integers(0, 12),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.99),
    st.sets(st.integers(0, 11), max_size=6),
)
def test_filters_against_a_plain_reading(
    logits: list[float], top_k: int, top_p: float, min_p: float, barred: set[int]
) -> None:
    logprobs = row(*logits)
    allowed = [i for i in range(len(logits)) if i not in barred]
    assume(allowed)
    order = sorted(allowed, key=lambda i: (-logprobs[i], i))
    order = order[: top_k or None]
    mass = [math.exp(float(logprobs[i])) for i in order]
    bound = top_p * math.fsum(mass) * NUCLEUS_SLACK
    stay = [i for n, i in enumerate(order) if n == 0 or math.fsum(mass[:n]) < bound or top_p == 1.0]
    stay = [i for i in stay if min_p == 0.0 or float(logprobs[i]) >= float(logprobs[stay[0]]) + math.log(min_p)]
    result = kept(logprobs, tuple(i for i in barred if i < len(logits)), top_k=top_k, top_p=top_p, min_p=min_p)
    # Sums in two orders may fall on two sides of an exactly equal bound; then the sets differ by tied mass only.
    margin = [abs(math.fsum(mass[:n]) - bound) for n in range(1, len(mass))]
    assert result == sorted(stay) or min(margin, default=1.0) < 1e-12
    assert result and not set(result) & barred


# ---- behavior log-prob (A3) -------------------------------------------------------------------------------------


def test_kept_mass_of_the_case() -> None:
    logprobs = row(2, 1, 0)
    keep = kept_tokens(logprobs, SamplingParams(top_k=2), NONE)
    policy = np.float32(logprobs[1])
    behavior = behavior_logprob(policy, logprobs, keep)
    assert behavior.dtype == np.float32
    assert float(policy) == pytest.approx(-1.40761, abs=1e-5)
    assert float(behavior) == pytest.approx(-1.31326, abs=1e-5)
    assert float(policy) - float(behavior) == pytest.approx(-0.09434, abs=1e-5)
    # A trainer that is given the kept set finds the same value from its own full row.
    replayed = float(policy) - math.log(np.exp(logprobs[keep].astype(np.float64)).sum())
    assert abs(replayed - float(behavior)) < 1e-6


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_k": 100}, {"top_p": 1.0}, {"min_p": 1e-9}])
def test_nothing_dropped_is_the_same_bits(params: dict[str, Any]) -> None:
    logprobs = row(2.7, 1.1, 0.3)
    keep = kept_tokens(logprobs, SamplingParams(**params), NONE)
    for token in range(3):
        policy = np.float32(logprobs[token])
        assert behavior_logprob(policy, logprobs, keep).tobytes() == policy.tobytes()
        assert behavior_logprob(policy, logprobs, None).tobytes() == policy.tobytes()
    dropped = kept_tokens(logprobs, SamplingParams(top_k=2), NONE)
    assert behavior_logprob(np.float32(logprobs[0]), logprobs, dropped) != logprobs[0]


def test_behavior_sums_to_one_over_the_kept() -> None:
    logprobs = row(*np.random.default_rng(0).standard_normal(50))
    for params in ({"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}):
        keep = kept_tokens(logprobs, SamplingParams(**params), NONE)
        total = sum(math.exp(behavior_logprob(np.float32(logprobs[i]), logprobs, keep)) for i in np.flatnonzero(keep))
        assert total == pytest.approx(1.0, abs=1e-6)


def test_behavior_of_tokens_whose_mass_underflows() -> None:
    """T = 0.01 and a barred favourite: every kept token may lie below exp(-745)."""
    logprobs = np.array([0.0, -1000.0, -1001.0], np.float32)
    keep = kept_tokens(logprobs, SamplingParams(), np.array([0]))
    behavior = behavior_logprob(np.float32(logprobs[1]), logprobs, keep)
    assert float(behavior) == pytest.approx(-math.log1p(math.exp(-1)), abs=1e-4)


def test_behavior_is_never_above_zero() -> None:
    policies = np.linspace(-10, 0, 501).astype(np.float32)
    only = np.array([True, False])
    values = [behavior_logprob(p, np.array([p, -30.0], np.float32), only) for p in policies]
    assert max(values) <= 0.0
