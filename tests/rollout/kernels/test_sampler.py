"""C2: hash, noise and token choice against SGLang's published algorithm, recomputed here with none of our code."""

from __future__ import annotations

import math

import numba
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.kernels.cpu import sampler as fast
from rollout.sampling import column_hash, draw, gumbel, row_state, sample_seed

DBL_MAX = 1.7976931348623157e308


# ---- an independent implementation ------------------------------------------------------------------------------


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86_32 of whole 4-byte blocks with seed 0, from its published description."""
    h = 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 % 2**32
        k = ((k << 15) % 2**32 + (k >> 17)) * 0x1B873593 % 2**32
        h ^= k
        h = (((h << 13) % 2**32 + (h >> 19)) * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def published_hashes(seed: int, position: int, vocab: int) -> npt.NDArray[np.uint32]:
    """All columns of a row at once in uint32 arithmetic, with SGLang's order of words."""

    def rotl(x: npt.NDArray[np.uint32], r: int) -> npt.NDArray[np.uint32]:
        return (x << np.uint32(r)) | (x >> np.uint32(32 - r))

    seed %= 2**64
    h = np.zeros(vocab, np.uint32)
    words = (seed % 2**32, seed >> 32, position % 2**32)
    for word in (*(np.full(vocab, w, np.uint32) for w in words), np.arange(vocab, dtype=np.uint32)):
        h ^= rotl(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        h = rotl(h, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    h ^= np.uint32(16)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def published_noise(hashes: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        x = np.log(hashes.astype(np.float64) / 4294967295)
    return -np.log(-np.clip(x, -DBL_MAX, -(2.0**-32)))


def published_choice(logprobs: npt.NDArray[np.float32], seed: int, position: int) -> int:
    scores = published_noise(published_hashes(seed, position, len(logprobs))) + logprobs.astype(np.float64)
    return int(np.argmax(scores))


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    shifted = logits - logits.max()
    return (shifted - math.log(np.exp(shifted).sum())).astype(np.float32)


def random_row(vocab: int, scale: float, seed: int) -> npt.NDArray[np.float32]:
    return log_softmax(np.random.default_rng(seed).standard_normal(vocab) * scale)


@pytest.fixture(scope="module")
def draws() -> fast.CpuSampler:
    return fast.CpuSampler()


# ---- hash -------------------------------------------------------------------------------------------------------


VECTORS = {b"": 0, b"test": 0xBA6BD213, b"\x21\x43\x65\x87": 0xF55B516B}
"""Public test vectors of MurmurHash3 x86_32 with seed 0."""


def test_the_reference_is_murmurhash3() -> None:
    assert {data: murmur3(data) for data in VECTORS} == VECTORS


GOLDEN = [
    # seed, position, token id -> hash: literals, so that reference and code cannot move together
    (0, 0, 0, 0x8134CDF8),
    (1, 5, 7, 0x874C0BA8),
    (42, 127, 49151, 0x64C95BAC),
    (2**63 - 1, 4095, 151935, 0xB27791D9),
    (2**64 - 1, 2**31 - 1, 2**31 - 1, 0xDE28B35A),
    (-1, 1, 0, 0x0A1DB464),
]


@pytest.mark.parametrize(("seed", "position", "column", "expected"), GOLDEN)
def test_golden_hashes(seed: int, position: int, column: int, expected: int) -> None:
    words = (seed % 2**32, (seed % 2**64) >> 32, position, column)
    assert murmur3(b"".join(w.to_bytes(4, "little") for w in words)) == expected
    assert column_hash(sample_seed(seed, 0), position, column) == expected


@pytest.mark.parametrize("changed", ["seed low", "seed high", "position", "column", "length"])
def test_every_word_enters_the_hash(changed: str) -> None:
    """Negative control of the golden values: a hash that forgets or swaps one word is another hash."""
    words = {"seed low": 42, "seed high": 3, "position": 127, "column": 9}
    right = column_hash(42 | 3 << 32, 127, 9)
    if changed == "length":
        wrong = murmur3(b"".join(w.to_bytes(4, "little") for w in words.values()) + bytes(4))
    else:
        wrong = murmur3(b"".join((w ^ (n == changed)).to_bytes(4, "little") for n, w in words.items()))
    assert wrong != right == murmur3(b"".join(w.to_bytes(4, "little") for w in words.values()))


@numba.njit
def compiled_hashes(state: np.uint32, count: int) -> np.ndarray:
    out = np.empty(count, np.uint32)
    for i in range(count):
        out[i] = fast._column_hash(state, np.uint32(i))
    return out


@numba.njit
def compiled_noise(hashes: np.ndarray) -> np.ndarray:
    out = np.empty(hashes.size, np.float64)
    for i in range(hashes.size):
        out[i] = fast._gumbel(hashes[i])
    return out


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 300), (2**64 - 5, 2**31 - 1), (1 << 40, 1)])
def test_definition_and_compiled_hash_equal_the_published_one(seed: int, position: int) -> None:
    expected = published_hashes(seed, position, 4096)
    assert [column_hash(seed, position, c) for c in range(0, 4096, 97)] == expected[::97].tolist()
    compiled = compiled_hashes(np.uint32(row_state(seed, position)), 4096)
    assert np.array_equal(compiled, expected)
    assert not np.array_equal(compiled, published_hashes(seed, position + 1, 4096))


# ---- noise (D4) -------------------------------------------------------------------------------------------------

EDGES = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFE, 0xFFFFFFFF]


def test_noise_is_finite_for_every_edge_hash() -> None:
    noise = [gumbel(h) for h in EDGES]
    assert all(math.isfinite(g) for g in noise)
    assert noise[0] == -math.log(DBL_MAX)
    assert noise[-1] == 32 * math.log(2)
    assert noise == sorted(noise)
    assert compiled_noise(np.array(EDGES, np.uint32)).tolist() == noise
    assert published_noise(np.array(EDGES, np.uint32)).tolist() == pytest.approx(noise, rel=1e-15)


def test_float32_uniforms_would_not_be() -> None:
    """Negative control: in float32 the top 128 hashes become 1.0, and their noise infinite."""
    uniform = np.array([0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFF], np.uint32).astype(np.float32) / np.float32(2**32)
    with np.errstate(divide="ignore"):
        noise = -np.log(-np.log(uniform))
    assert np.isfinite(noise).tolist() == [True, False, False]


def test_threshold_table_never_skips_a_possible_winner() -> None:
    """The largest hash below entry i has noise below the entry's bound; checked at the edge and on random hashes."""
    table = fast.threshold_table()
    bounds = -4.0 + np.arange(len(table)) / 8.0
    below = table[table > 0] - np.uint32(1)
    assert (compiled_noise(below) < bounds[table > 0]).all()
    hashes = np.random.default_rng(3).integers(0, 2**32, 20_000, dtype=np.uint32)
    noise = compiled_noise(hashes)
    entry = np.clip(np.floor((noise + 4.0) * 8.0).astype(int), 0, len(table) - 1)
    reachable = noise >= -4.0
    assert (hashes[reachable] >= table[entry[reachable]]).all()
    # Control: one entry too high would lose winners.
    assert (hashes[reachable] < table[entry[reachable] + 1]).any()


# ---- token choice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "scale"), [(2, 1.0), (64, 3.0), (1000, 0.1), (1025, 8.0), (4097, 3.0)])
def test_choice_equals_definition_and_publication(draws: fast.CpuSampler, vocab: int, scale: float) -> None:
    wrong_position = 0
    for k in range(8):
        row = random_row(vocab, scale, 10 * vocab + k)
        seed, position = sample_seed(1234 + k, k), 17 * k
        token = draws.draw(row, None, seed, position)
        assert token == draw(row, None, seed, position) == published_choice(row, seed, position)
        wrong_position += token != published_choice(row, seed, position + 1)
    assert wrong_position > 0


def test_choice_over_a_real_vocabulary(draws: fast.CpuSampler) -> None:
    for k, scale in enumerate((0.5, 2.0, 6.0) * 4):
        row = random_row(49152, scale, k)
        assert draws.draw(row, None, 99 + k, k) == published_choice(row, 99 + k, k)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-200, 0, width=32), min_size=1, max_size=40),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 1),
    st.data(),
)
def test_choice_on_any_row(values: list[float], seed: int, position: int, data: st.DataObject) -> None:
    row = np.array(values, np.float32)
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))), np.bool_)
    sampler = fast.CpuSampler()
    assert sampler.draw(row, None, seed, position) == published_choice(row, seed, position)
    masked = np.where(keep, row, np.float32(-np.inf))
    expected = published_choice(masked, seed, position) if keep.any() else -1
    assert sampler.draw(row, keep, seed, position) == draw(row, keep, seed, position) == expected


def seed_with_hash(column: int, wanted: str, position: int = 3, vocab: int = 64) -> int:
    """A seed whose noise at ``column`` is the largest or the smallest of the row."""
    pick = np.argmax if wanted == "top" else np.argmin
    return next(s for s in range(10_000) if pick(published_hashes(s, position, vocab)) == column)


def test_a_masked_column_with_the_top_hash_never_wins(draws: fast.CpuSampler) -> None:
    row = np.full(64, -math.log(64), np.float32)
    seed = seed_with_hash(11, "top")
    assert draws.draw(row, None, seed, 3) == 11
    keep = np.ones(64, np.bool_)
    keep[11] = False
    assert draws.draw(row, keep, seed, 3) == draw(row, keep, seed, 3) != 11
    row[11] = -np.inf
    assert draws.draw(row, None, seed, 3) == draw(row, None, seed, 3) != 11


def test_extreme_rows(draws: fast.CpuSampler) -> None:
    only = np.full(64, -np.inf, np.float32)
    only[5] = 0.0
    worst = seed_with_hash(5, "bottom")
    assert draws.draw(only, None, worst, 3) == draw(only, None, worst, 3) == 5
    hopeless = np.full(64, np.float32(-3e38))
    assert draws.draw(hopeless, None, 1, 3) == draw(hopeless, None, 1, 3) >= 0
    assert draws.draw(np.full(64, -np.inf, np.float32), None, 1, 3) == -1
    assert draws.draw(np.zeros(64, np.float32), np.zeros(64, np.bool_), 1, 3) == -1


@pytest.mark.parametrize("column", [0, 31, 63])
def test_nan_is_never_drawn_past(draws: fast.CpuSampler, column: int) -> None:
    row = random_row(64, 1.0, 4)
    assert draws.draw(row, None, 1, 3) >= 0
    row[column] = np.nan
    assert draws.draw(row, None, 1, 3) == -1


def test_ties_go_to_the_lowest_id(draws: fast.CpuSampler) -> None:
    # Noise of at most 22.2 vanishes beside 1e20 in float64, so all scores tie.
    row = np.full(64, np.float32(-1e20))
    for seed in range(5):
        assert draws.draw(row, None, seed, 0) == draw(row, None, seed, 0) == 0
    keep = np.ones(64, np.bool_)
    keep[:7] = False
    assert draws.draw(row, keep, 1, 0) == draw(row, keep, 1, 0) == 7


def test_a_draw_depends_on_its_arguments_alone(draws: fast.CpuSampler) -> None:
    rows = [random_row(v, 2.0, v) for v in (64, 3000, 1024)]
    alone = [fast.CpuSampler().draw(r, None, 5, 9) for r in rows]
    assert [draws.draw(r, None, 5, 9) for r in rows] == alone
    assert [draws.draw(r, None, 5, 9) for r in reversed(rows)] == alone[::-1]


# ---- distribution (property 10) ---------------------------------------------------------------------------------

DRAWS = 30_000


def chi_square(counts: npt.NDArray[np.int64], probs: npt.NDArray[np.float64]) -> float:
    expected = probs * counts.sum()
    assert expected.min() >= 5, "too few draws for the test"
    return float(((counts - expected) ** 2 / expected).sum())


def limit(degrees: int) -> float:
    """About five standard deviations above the mean of chi-square: a right sampler passes all but once in a million."""
    return degrees + 5 * math.sqrt(2 * degrees)


@pytest.fixture(scope="module")
def law() -> npt.NDArray[np.float32]:
    return random_row(24, 1.2, 8)


def test_draws_follow_softmax(draws: fast.CpuSampler, law: npt.NDArray[np.float32]) -> None:
    probs = np.exp(law.astype(np.float64))
    counts = {
        "positions": [draws.draw(law, None, 2024, p) for p in range(DRAWS)],
        "siblings": [draws.draw(law, None, sample_seed(77, i), 5) for i in range(DRAWS)],
        "seeds": [draws.draw(law, None, s, 5) for s in range(DRAWS)],
    }
    for name, drawn in counts.items():
        assert chi_square(np.bincount(drawn, minlength=24), probs) < limit(23), name


def test_a_biased_sampler_is_rejected(draws: fast.CpuSampler, law: npt.NDArray[np.float32]) -> None:
    probs = np.exp(law.astype(np.float64))
    tempered = log_softmax(law.astype(np.float64) / 0.93)
    drawn = [draws.draw(tempered, None, 2024, p) for p in range(DRAWS)]
    assert chi_square(np.bincount(drawn, minlength=24), probs) > limit(23)
    # Uniform noise instead of Gumbel: repeatable, and wrong.
    noise = np.stack([published_hashes(2024, p, 24) for p in range(4000)]) / 2**32
    assert chi_square(np.bincount((noise + law).argmax(1), minlength=24), probs) > limit(23)


def test_kept_tokens_follow_the_renormalised_law(draws: fast.CpuSampler, law: npt.NDArray[np.float32]) -> None:
    keep = np.zeros(24, np.bool_)
    keep[np.argsort(-law)[:6]] = True
    probs = np.exp(law[keep].astype(np.float64))
    drawn = np.bincount([draws.draw(law, keep, 31, p) for p in range(DRAWS)], minlength=24)
    assert drawn[~keep].sum() == 0
    assert chi_square(drawn[keep], probs / probs.sum()) < limit(5)
    assert chi_square(drawn[keep], np.full(6, 1 / 6)) > limit(5)


@pytest.mark.parametrize("pairing", ["next position", "next sibling", "same seed twice"])
def test_draws_are_independent(draws: fast.CpuSampler, law: npt.NDArray[np.float32], pairing: str) -> None:
    """Contingency of two draws that share everything but position, or but sample index."""
    coarse = np.argsort(np.argsort(-law)) // 6  # four groups of ids

    def drawn(i: int) -> tuple[int, int]:
        if pairing == "next position":
            return draws.draw(law, None, 5, 2 * i), draws.draw(law, None, 5, 2 * i + 1)
        other = 1 if pairing == "next sibling" else 0
        return draws.draw(law, None, i, 8), draws.draw(law, None, sample_seed(i, other), 8)

    table = np.zeros((4, 4), np.int64)
    for i in range(DRAWS):
        a, b = drawn(i)
        table[coarse[a], coarse[b]] += 1
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    statistic = float(((table - expected) ** 2 / expected).sum())
    assert (statistic > limit(9)) == (pairing == "same seed twice")
