"""C1: one log-prob routine, its values, and digests of whole rows."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math

import numpy as np
import pytest
import torch

from rollout import logprobs as module
from rollout.logprobs import effective_temperature, policy_logprob_rows, policy_logprobs, row_digests

CASE = [2.0, 1.0, 0.0]


def value(logits: list[float], token: int, temperature: float, dtype: torch.dtype = torch.float32) -> float:
    rows = torch.tensor([logits], dtype=dtype)
    result = policy_logprobs(rows, torch.tensor([token]), torch.tensor([temperature]), len(logits))
    assert result.dtype == torch.float32
    return float(result[0])


# ---- values (A1, I1) --------------------------------------------------------------------------------------------


def test_temperature_divides_before_softmax() -> None:
    assert value(CASE, 1, 0.5) == pytest.approx(-2.14293, abs=1e-5)
    assert value(CASE, 1, 1.0) == pytest.approx(-1.40761, abs=1e-5)
    # The wrong answer of the wild: the log-prob divided by T afterwards.
    assert abs(value(CASE, 1, 0.5) - -2.81521) > 0.5


@pytest.mark.parametrize("temperature", [0.01, 0.5, 0.7, 1.0, 1.3, 50.0])
def test_probabilities_sum_to_one(temperature: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((5, 1000)).astype(np.float32) * 6)
    rows = policy_logprob_rows(logits, torch.full((5,), temperature), 1000)
    assert rows.double().exp().sum(-1).tolist() == pytest.approx([1.0] * 5, abs=1e-5)


def test_bfloat16_logits_are_cast_before_anything_else() -> None:
    """I1: 20.00 and 20.06 are one number in bfloat16, 0.03 nat in float32; the head's dtype is part of the contract."""
    assert value([20.0, 20.06], 0, 1.0, torch.bfloat16) == pytest.approx(-math.log(2), abs=1e-6)
    assert value([20.0, 20.06], 0, 1.0) == pytest.approx(-math.log1p(math.exp(0.06)), abs=1e-5)
    # The division by T happens in float32: a bfloat16 quotient would round 1.0078125 / 0.7 away.
    exact = np.float32(1.0078125) / np.float32(0.7)
    rows = policy_logprob_rows(torch.tensor([[1.0078125, 0.0]], dtype=torch.bfloat16), torch.tensor([0.7]), 2)
    assert float(rows[0, 0] - rows[0, 1]) == pytest.approx(float(exact), abs=3e-7)
    rounded = float((torch.tensor(1.0078125, dtype=torch.bfloat16) / 0.7).to(torch.bfloat16))
    assert abs(rounded - float(exact)) > 1e-3


def test_greedy_scores_as_temperature_one() -> None:
    assert effective_temperature(0.0) == 1.0
    assert effective_temperature(0.7) == float(np.float32(0.7)) != 0.7
    assert value(CASE, 1, effective_temperature(0.0)) == value(CASE, 1, 1.0)


def test_alignment_columns_never_count() -> None:
    logits = torch.from_numpy(np.random.default_rng(2).standard_normal((3, 60)).astype(np.float32))
    padded = torch.cat((logits, torch.tensor([[9e9, math.nan, math.inf, -math.inf]]).expand(3, 4)), 1)
    temperatures = torch.tensor([1.0, 0.5, 2.0])
    plain = policy_logprob_rows(logits, temperatures, 60)
    assert torch.equal(policy_logprob_rows(padded, temperatures, 60), plain)
    assert row_digests(padded, 60).tolist() == row_digests(logits, 60).tolist()
    # Control: counting them changes every value.
    assert not torch.equal(policy_logprob_rows(padded[:, :61], temperatures, 61)[:, :60], plain)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).standard_normal((40, 4099)).astype(np.float32) * 4)
    temperatures = torch.linspace(0.3, 2.0, 40)
    together = policy_logprob_rows(logits, temperatures, 4099)
    for count in (1, 2, 3, 17):
        assert torch.equal(policy_logprob_rows(logits[:count], temperatures[:count], 4099), together[:count])
    assert torch.equal(policy_logprob_rows(logits[20:21], temperatures[20:21], 4099)[0], together[20])
    # Control: a neighbour's temperature would show.
    assert not torch.equal(policy_logprob_rows(logits[20:21], temperatures[21:22], 4099)[0], together[20])


def test_gradient() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    policy_logprobs(logits, torch.tensor([1]), torch.tensor([0.5]), 3).sum().backward()
    probs = torch.softmax(torch.tensor([4.0, 2.0, 0.0]), 0)
    expected = (torch.tensor([0.0, 1.0, 0.0]) - probs) / 0.5
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


# ---- one routine (J8) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["rollout.top_logprobs", "trainer_bridge.forward"])
def test_both_sides_import_the_one_routine(user: str) -> None:
    """The sampler's compiled twin is compared with it bit by bit in kernels/test_logprob.py."""
    imported = importlib.import_module(user)
    shared = [n for n in ("policy_logprobs", "policy_logprob_rows") if getattr(imported, n, None) is getattr(module, n)]
    assert shared, f"{user} does not use rollout.logprobs"
    assert "log_softmax(" not in inspect.getsource(imported)


def test_another_implementation_gives_other_bits() -> None:
    """Negative control: the textbook formula is as right and not the same."""
    logits = torch.from_numpy(np.random.default_rng(4).standard_normal((50, 997)).astype(np.float32) * 5)
    ours = policy_logprob_rows(logits, torch.full((50,), 0.7), 997)
    scaled = logits / 0.7
    other = scaled - torch.logsumexp(scaled, -1, keepdim=True)
    assert torch.allclose(ours, other, atol=1e-5)
    assert not torch.equal(ours, other)


# ---- digests ----------------------------------------------------------------------------------------------------


def test_digest_is_blake2b_of_the_float32_bytes() -> None:
    logits = torch.tensor([[1.5, -2.0, 0.0], [0.0, 1.0, 2.0]], dtype=torch.bfloat16)
    rows = np.array([[1.5, -2.0, 0.0], [0.0, 1.0, 2.0]], "<f4")
    expected = [int.from_bytes(hashlib.blake2b(r.tobytes(), digest_size=8).digest(), "little") for r in rows]
    assert row_digests(logits, 3).tolist() == row_digests(logits.float(), 3).tolist() == expected


@pytest.mark.parametrize("column", [0, 500, 998])
def test_digest_sees_one_bit(column: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(5).standard_normal((3, 999)).astype(np.float32))
    before = row_digests(logits, 999)
    logits.view(torch.int32)[1, column] ^= 1
    after = row_digests(logits, 999)
    assert (before == after).tolist() == [True, False, True]
    assert row_digests(torch.zeros(1, 4), 4) != row_digests(-torch.zeros(1, 4), 4)


def test_digest_of_any_layout() -> None:
    logits = torch.from_numpy(np.random.default_rng(6).standard_normal((64, 33)).astype(np.float32))
    strided = logits.t().contiguous().t()
    assert row_digests(strided, 33).tolist() == row_digests(logits, 33).tolist()
    assert row_digests(logits[:0], 33).shape == (0,)
