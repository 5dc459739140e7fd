"""How two tensors differ, case by case, and the readings that are told apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer_bridge.explain.inputs import _how_ids_differ, _positions
from trainer_bridge.explain.judge import ulp_of
from trainer_bridge.explain.weights import describe

A = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def spoiled(kind: str) -> torch.Tensor:
    flat = A.clone()
    if kind == "not finite":
        flat[0, 0] = float("nan")
    if kind == "corrupt":
        flat[3, 4] += 1e-3
    return flat


@pytest.mark.parametrize(
    ("other", "kind", "said"),
    [
        (A.bfloat16().float(), "cast", "trainer's values went through bfloat16"),
        (A.half().float(), "cast", "float16"),
        (A[:4], "shape", "[4, 8]"),
        (A.half(), "cast", "torch.float16"),
        (torch.ones_like(A), "not loaded", "all 1"),
        (A.T.clone(), "permuted", "transposed"),
        (A.roll(1, 0), "permuted", "moved by +1"),
        (A[torch.tensor([1, 0, 2, 3, 4, 5, 7, 6])], "permuted", "rows in another order"),
        (A.flip(1), "permuted", "values in another order"),
        (spoiled("not finite"), "not finite", "NaN"),
        (spoiled("corrupt"), "corrupt", "first at [3, 4]"),
        (A * 1.001, "stale", "another step"),
        (torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), "different", "another tensor"),
    ],
)
def test_describe(other: torch.Tensor, kind: str, said: str) -> None:
    found, words, _ = describe(A, other)
    assert found == kind and said in words


def test_the_side_that_was_rounded_is_named() -> None:
    _, words, _ = describe(A.bfloat16().float(), A)
    assert "rollout's values went through bfloat16" in words


def test_positions() -> None:
    assert _positions(np.arange(5, dtype=np.int32)) is None
    moved = _positions(np.arange(3, 8, dtype=np.int32))
    assert moved is not None and "start at 3" in moved.sentence
    broken = _positions(np.array([0, 1, 1, 2], np.int32))
    assert broken is not None and broken.place == "position 2"


def test_ids() -> None:
    ours = np.array([5, 6, 7, 8], np.int32)
    assert _how_ids_differ(ours, np.array([1, 5, 6, 7, 8], np.int32), 2)[0] == "template"
    assert _how_ids_differ(ours, ours[1:], 2)[1] == "the trainer lacks the first 1 token(s)"
    assert _how_ids_differ(ours, ours[:-1], 2)[1] == "the trainer lacks the last 1 token(s)"
    assert _how_ids_differ(ours, np.array([5, 9, 7, 8], np.int32), 2)[0] == "ids"


def test_ulp_in_the_tensors_own_dtype() -> None:
    one = torch.tensor([1.0])
    assert ulp_of(one, torch.nextafter(one, torch.tensor([2.0]))) == 1
    assert ulp_of(one.bfloat16(), torch.tensor([1.0078125]).bfloat16()) == 1
    assert ulp_of(one, one) == 0
