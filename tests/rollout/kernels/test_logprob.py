"""C1 compiled: whole rows, single tokens and torch.log_softmax in invariant mode are the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.kernels.cpu.invariant import invariant_mode
from rollout.kernels.cpu.logprob import log_softmax_rows
from rollout.kernels.cpu.sampler import DRAW, FILTERED, GIVEN, GREEDY, NOTHING_LEFT, CpuSampler, RowsToSample
from rollout.logprobs import policy_logprob_rows
from rollout.sampling import MASK32, behavior_logprob, draw, kept_tokens, row_state
from rollout.types import SamplingParams
from tests.engines import torch_threads

Filters = Sequence[tuple[float, float, float]]
Bars = Sequence[Sequence[int]]
VOCABS = [1, 5, 255, 256, 257, 1000, 4099]


def logits_of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * 4).to(dtype)


def rows_to_sample(
    temperatures: torch.Tensor, kinds: list[int], tokens: torch.Tensor, filters: Filters = (), barred: Bars = ()
) -> RowsToSample:
    rows = len(kinds)
    bars = [np.asarray(b, np.int64) for b in barred] or [np.empty(0, np.int64)] * rows
    return RowsToSample(
        temperatures=temperatures,
        states=torch.tensor([row_state(i, 100 + i) & MASK32 for i in range(rows)]),
        kinds=torch.tensor(kinds),
        filters=torch.tensor(list(filters) or [(0.0, 1.0, 0.0)] * rows, dtype=torch.float64),
        bars=torch.from_numpy(np.cumsum([0, *(len(b) for b in bars)])),
        barred=torch.from_numpy(np.concatenate(bars)),
        tokens=tokens,
    )


def sampled(
    logits: torch.Tensor, vocab: int, temperatures: torch.Tensor, kind: int, tokens: torch.Tensor
) -> torch.Tensor:
    rows = rows_to_sample(temperatures, [kind] * logits.size(0), tokens)
    both = CpuSampler().sample(logits, vocab, rows)
    assert both[:, 0].numpy().tobytes() == both[:, 1].numpy().tobytes()
    return both[:, 0]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_tokens_and_torch_agree_to_the_bit(vocab: int, dtype: torch.dtype) -> None:
    logits = logits_of(5, vocab + 3, dtype)
    logits[:, vocab:] = torch.nan
    temperatures = torch.tensor([1.0, 0.7, 1.3, 0.1, 1.0])
    with invariant_mode():
        rows = policy_logprob_rows(logits, temperatures, vocab)
        assert torch.equal(policy_logprob_rows(logits[2:3], temperatures[2:3], vocab)[0], rows[2])
    stored = logits.view(torch.uint16).numpy() if dtype == torch.bfloat16 else logits.numpy()
    direct = np.empty((5, vocab), np.float32)
    log_softmax_rows(stored, temperatures.numpy(), direct)
    assert direct.tobytes() == rows.numpy().tobytes()
    exact = torch.log_softmax(logits[:, :vocab].double() / temperatures[:, None].double(), -1)
    assert torch.allclose(rows.double(), exact, rtol=0, atol=3e-5)
    for token in {0, vocab // 2, vocab - 1}:
        given = torch.full((5,), token)
        assert torch.equal(sampled(logits, vocab, temperatures, GIVEN, given), rows[:, token])
    if vocab > 100:
        # Control: torch's own order has other bits somewhere.
        assert not torch.equal(policy_logprob_rows(logits, temperatures, vocab), rows)


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_and_greedy_choices_are_the_definitions(vocab: int) -> None:
    logits = logits_of(6, vocab)
    temperatures = torch.tensor([1.0, 0.7, 1.3, 2.0, 1.0, 5.0])
    with invariant_mode():
        rows = policy_logprob_rows(logits, temperatures, vocab).numpy()
    tokens = torch.empty(6, dtype=torch.int64)
    got = sampled(logits, vocab, temperatures, DRAW, tokens)
    assert tokens.tolist() == [draw(row, None, i, 100 + i) for i, row in enumerate(rows)]
    assert got.numpy().tobytes() == rows[np.arange(6), tokens.numpy()].tobytes()
    sampled(logits, vocab, temperatures, GREEDY, tokens)
    assert tokens.tolist() == rows.argmax(1).tolist()


def test_greedy_ties_by_rounding_go_to_the_lowest_id() -> None:
    """Two logits that differ may have one log-prob: the lower id wins, though its logit is the smaller."""
    logits = torch.full((1, 64), 100.0)
    logits[0, 7] = 100.00001
    with invariant_mode():
        row = policy_logprob_rows(logits, torch.ones(1), 64)[0]
    tokens = torch.empty(1, dtype=torch.int64)
    sampled(logits, 64, torch.ones(1), GREEDY, tokens)
    assert tokens[0] == int(np.argmax(row.numpy()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_row_is_never_drawn_from(value: float) -> None:
    logits = logits_of(3, 300, torch.float32)
    logits[1, 211] = value
    tokens = torch.empty(3, dtype=torch.int64)
    got = sampled(logits, 300, torch.ones(3), DRAW, tokens)
    assert tokens[1] == -1 and torch.isnan(got[1]) and (tokens[[0, 2]] >= 0).all()
    logits[1] = -torch.inf
    assert torch.isnan(sampled(logits, 300, torch.ones(3), GIVEN, torch.zeros(3, dtype=torch.int64))[1])
    with invariant_mode():
        assert torch.isnan(policy_logprob_rows(logits, torch.ones(3), 300)[1]).all()


def test_threads_and_company_change_nothing() -> None:
    logits = logits_of(40, 5000)
    temperatures = torch.linspace(0.5, 2, 40)
    results = []
    for threads in (1, 2):
        tokens = torch.empty(40, dtype=torch.int64)
        with torch_threads(threads):
            results.append((sampled(logits, 5000, temperatures, DRAW, tokens), tokens))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_gradients_are_torchs() -> None:
    logits = logits_of(2, 50, torch.float32).requires_grad_()
    with invariant_mode():
        (ours,) = torch.autograd.grad(policy_logprob_rows(logits, torch.ones(2), 50)[:, 3].sum(), logits)
    (theirs,) = torch.autograd.grad(torch.log_softmax(logits, -1)[:, 3].sum(), logits)
    assert torch.allclose(ours, theirs, atol=1e-6)


# ---- filters ----------------------------------------------------------------------------------------------------

probability = st.one_of(st.just(1.0), st.floats(1e-6, 1.0, exclude_min=True))


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 17, 300, 1031]),
    scale=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    coarse=st.booleans(),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 5000]),
    top_p=probability,
    min_p=st.one_of(st.just(0.0), st.floats(1e-9, 0.999)),
    bars=st.integers(0, 3),
    greedy=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_filtered_rows_are_the_definitions(
    vocab: int, scale: float, coarse: bool, top_k: int, top_p: float, min_p: float, bars: int, greedy: bool, seed: int
) -> None:
    """Ids kept, token and behavior log-prob, with ties, barred favourites and everything barred."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((2, vocab)) * scale).astype(np.float32)
    logits = torch.from_numpy(np.round(values) if coarse else values)
    temperatures = torch.tensor([1.0, 0.7])
    if bars == 3:
        barred = list(range(vocab))
    elif bars == 2:
        barred = [int(values[0].argmax()), int(values[1].argmax())]
    else:
        barred = rng.choice(vocab, bars * (vocab // 3), replace=False).tolist()
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    with invariant_mode():
        whole = policy_logprob_rows(logits, temperatures, vocab).numpy()
    tokens = torch.empty(2, dtype=torch.int64)
    kind = FILTERED + (GREEDY if greedy else DRAW)
    rows = rows_to_sample(temperatures, [kind] * 2, tokens, [(top_k, top_p, min_p)] * 2, [barred] * 2)
    got = CpuSampler().sample(logits, vocab, rows).numpy()
    for i, row in enumerate(whole):
        keep = kept_tokens(row, params, np.array(barred, np.int64))
        if not keep.any():
            assert tokens[i] == NOTHING_LEFT and np.isnan(got[i]).all()
            continue
        masked = np.where(keep, row, -np.inf).astype(np.float32)
        token = int(masked.argmax()) if greedy else draw(row, keep, i, 100 + i)
        assert tokens[i] == token
        assert got[i, 0].tobytes() == row[token].tobytes()
        assert got[i, 1].tobytes() == behavior_logprob(row[token], row, keep).tobytes()


def test_filters_over_a_real_vocabulary_and_a_control() -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy((rng.standard_normal((1, 49152)) * 3).astype(np.float32)).bfloat16()
    with invariant_mode():
        row = policy_logprob_rows(logits, torch.ones(1), 49152).numpy()[0]
    for top_k, top_p, min_p in ((0, 0.95, 0.0), (50, 1.0, 0.0), (0, 1.0, 0.05), (200, 0.5, 0.01), (0, 0.999, 0.0)):
        tokens = torch.empty(1, dtype=torch.int64)
        rows = rows_to_sample(torch.ones(1), [FILTERED], tokens, [(top_k, top_p, min_p)], [[7, 9]])
        got = CpuSampler().sample(logits, 49152, rows).numpy()[0]
        keep = kept_tokens(row, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p), np.array([7, 9]))
        token = int(tokens[0])
        assert token == draw(row, keep, 0, 100)
        assert got[1].tobytes() == behavior_logprob(row[token], row, keep).tobytes() != got[0].tobytes()
        # Control: one id more or less is another distribution.
        keep[np.flatnonzero(keep)[-1]] = False
        assert keep.sum() == 0 or behavior_logprob(row[token], row, keep).tobytes() != got[1].tobytes()
