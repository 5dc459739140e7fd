"""The likeliest tokens of a row: exact, ties to the lowest id, and nobody else's bits change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rollout.batch import OutputRow
from rollout.logprobs import policy_logprob_rows, top_logprob_rows
from rollout.sequence import Sequence
from rollout.top_logprobs import tops_of


@given(
    arrays(np.float32, st.tuples(st.integers(1, 4), st.just(12)), elements=st.sampled_from([-np.inf, -3, -2, -2.5, 0])),
    st.integers(1, 12),
)
def test_as_a_full_sort(rows: np.ndarray, count: int) -> None:
    """Few distinct values, so that ties stand at every edge."""
    top = top_logprob_rows(rows, count)
    for row, ids, values in zip(rows, top.token_ids, top.logprobs, strict=True):
        expected = sorted(range(12), key=lambda i: (-row[i], i))[:count]
        assert ids.tolist() == expected
        assert values.tobytes() == row[expected].tobytes()


def test_an_order_by_value_alone_would_differ() -> None:
    """Negative control: a sort that is not stable in the id."""
    row = np.zeros((1, 12), np.float32)
    assert np.argsort(-row[0])[::-1][:3].tolist() != top_logprob_rows(row, 3).token_ids[0].tolist() == [0, 1, 2]


def test_a_longer_list_begins_with_the_shorter() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    long, short = top_logprob_rows(rows, 20), top_logprob_rows(rows, 3)
    assert long.token_ids[:, :3].tobytes() == short.token_ids.tobytes()
    assert long.logprobs[:, :3].tobytes() == short.logprobs.tobytes()


def test_nan_is_never_a_candidate() -> None:
    rows = np.zeros((2, 8), np.float32)
    rows[0, 3] = np.nan
    top = top_logprob_rows(rows, 2)
    assert top.token_ids.tolist() == [[-1, -1], [0, 1]] and np.isnan(top.logprobs[0]).all()


def asking(temperature: float, top: int) -> OutputRow:
    return OutputRow(Sequence("s", [2, 3], 2, 4, temperature=temperature, top_logprobs=top), 1)


@pytest.mark.parametrize("padding", [0, 4])
def test_each_row_gets_what_it_asked_for_over_the_model_vocabulary(padding: int) -> None:
    """Columns of alignment padding never count, whatever they hold."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(70, 64 + padding, generator=generator).to(torch.bfloat16)
    logits[:, 64:] = 1e4
    wanted = [(0.7, 0), (1.0, 3), (0.5, 64)] * 23 + [(1.0, 1)]
    outputs = tuple(asking(t, n) for t, n in wanted)
    tops = tops_of(logits, outputs, 64)
    rows = policy_logprob_rows(logits, torch.tensor([t for t, _ in wanted]), 64).numpy()
    for row, top, (_, n) in zip(rows, tops, wanted, strict=True):
        if n == 0:
            assert top is None
            continue
        assert top is not None and top.token_ids.shape == top.logprobs.shape == (1, n)
        assert top.logprobs.tobytes() == row[top.token_ids[0]].tobytes()
        assert top.token_ids[0].tolist() == sorted(range(64), key=lambda i: (-row[i], i))[:n]
