"""The reference itself: against Hugging Face's modules in float64, and against small cases done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.engines import random_prompt
from tests.oracle.dense import DenseOracle, rms_norm, rotate


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_equals_the_architecture(kind: str, request: pytest.FixtureRequest) -> None:
    """Within what Hugging Face's float32 rotary tables allow: 2^-24 of angles up to 60, on logits of size 10."""
    transformers.utils.logging.disable_progress_bar()
    path: Path = request.getfixturevalue(f"tiny_{kind}_path")
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    ids = random_prompt(60, 3)
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    oracle = DenseOracle(path, torch.float32)
    assert float((oracle.logits(ids) - expected).abs().max()) < 1e-4
    assert float((DenseOracle(path, torch.float32, theta=2 * oracle.theta).logits(ids) - expected).abs().max()) > 0.1


def test_logprobs_line_up(tiny_qwen3_path: Path) -> None:
    oracle, ids = DenseOracle(tiny_qwen3_path, torch.float32), random_prompt(9, 1)
    rows = torch.log_softmax(oracle.logits(ids) / 0.5, -1)
    values = oracle.logprobs(ids, 4, 0.5)
    assert values.tolist() == pytest.approx([float(rows[i - 1, ids[i]]) for i in range(4, 9)], abs=1e-12)
    assert rows.exp().sum(-1).tolist() == pytest.approx([1.0] * 9)


def test_norm_and_rotation_by_hand() -> None:
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert rms_norm(x, torch.tensor([1.0, 2.0]), 0.0).tolist() == pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5])
    turned = rotate(torch.tensor([[[1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64), 10_000.0)
    one = torch.tensor(1.0, dtype=torch.float64)
    assert turned[0].tolist() == [[1.0, 0.0], pytest.approx([float(one.cos()), float(one.sin())])]
    # What rotary embedding is for: products depend on the distance only.
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64).expand(2, 1, 9, 8)
    scores = (rotate(q, 100.0) @ rotate(k, 100.0).transpose(1, 2))[0]
    assert torch.allclose(scores[2:, 2:], scores[:-2, :-2])
    assert not torch.allclose(scores[2:, 2:], scores[1:-1, :-2])
