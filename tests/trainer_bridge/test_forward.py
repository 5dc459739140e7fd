"""Packing and the training forward: alignment of rows, gradients, padded batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.errors import InvalidRequest
from rollout.kernels.registry import resolve_kernels
from rollout.logprobs import policy_logprobs
from rollout.model import load_model
from trainer_bridge.forward import TrainingForward, TrainingSample, pack, unpad


def _sample(prompt: list[int], generated: list[int], temperature: float = 1.0) -> TrainingSample:
    return TrainingSample(np.array(prompt, np.int32), np.array(generated, np.int32), temperature)


def test_rows_are_the_ones_before_each_generated_token() -> None:
    batch = pack([_sample([5, 6, 7], [8, 9]), _sample([3], [4, 5, 6], 0.0)])
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 3, 4, 5, 6]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 5, 9]
    assert batch.rows.tolist() == [2, 3, 5, 6, 7]
    assert batch.targets.tolist() == [8, 9, 4, 5, 6]
    assert batch.temperatures.tolist() == [1.0] * 5
    assert batch.lengths == (2, 3)


@pytest.mark.parametrize(("prompt", "generated"), [([], [1]), ([1], [])])
def test_empty_parts_are_refused(prompt: list[int], generated: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="sample 0"):
        pack([_sample(prompt, generated)])
    with pytest.raises(InvalidRequest, match="no samples"):
        pack([])


def test_a_sample_longer_than_the_context_is_refused(tiny_qwen3_path: Path) -> None:
    """Positions that no rollout reaches would get log-probs all the same."""
    model = load_model(tiny_qwen3_path, dtype=torch.float32, kernels=resolve_kernels(page_size=16), context_length=8)
    forward = TrainingForward(model)
    with forward.aligned(), torch.no_grad():
        assert len(forward([_sample([3, 4, 5], [6, 7, 8, 9, 10])]).logprobs) == 5, "control: it fits"
        with pytest.raises(InvalidRequest, match="sample 1 has 9 tokens, the model's context holds 8"):
            forward([_sample([3], [4]), _sample([3, 4, 5, 6], [6, 7, 8, 9, 10])])


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_unpad_drops_pads_on_either_side(side: str) -> None:
    pads = {"left": (2, 0), "right": (0, 2), "none": (0, 0)}[side]
    ids = torch.tensor([[0] * pads[0] + [5, 6, 7, 8] + [0] * pads[1]])
    mask = torch.tensor([[0] * pads[0] + [1] * 4 + [0] * pads[1]])
    response = torch.tensor([[0] * pads[0] + [0, 0, 1, 1] + [0] * pads[1]])
    (sample,) = unpad(ids, mask, response)
    assert sample.prompt_ids.tolist() == [5, 6] and sample.token_ids.tolist() == [7, 8]


def test_unpad_refuses_what_it_would_misread() -> None:
    ids, ones = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(InvalidRequest, match="last ones"):
        unpad(ids, ones, torch.tensor([[0, 1, 0, 1]]))
    with pytest.raises(InvalidRequest, match="padded position"):
        unpad(ids, torch.tensor([[1, 1, 1, 0]]), torch.tensor([[0, 0, 1, 1]]))


def test_gradients_equal_those_of_one_plain_pass(tiny_qwen3_path: Path) -> None:
    """Chunked head with recomputation against logits held whole; forward bits equal, gradients finite and close."""
    model = load_model(tiny_qwen3_path, dtype=torch.float32, kernels=resolve_kernels(), trainable=True)
    forward = TrainingForward(model)
    samples = [_sample(list(range(2, 40)), list(range(5, 50))), _sample([3, 4], [9] * 20, 0.7)]
    with forward.aligned():
        out = forward(samples)
        out.logprobs.sum().backward()
        chunked = {n: p.grad.clone() for n, p in model.parameters() if p.grad is not None}
        model.hf.zero_grad()
        batch = pack(samples)
        from rollout.attention import PackedStep

        hidden = model.hidden_states(batch.input_ids, batch.positions, PackedStep(model.kernels, batch.cu_seqlens))
        whole = policy_logprobs(
            model.logits(hidden[batch.rows]), batch.targets, batch.temperatures, model.spec.vocab_size
        )
        whole.sum().backward()
    assert torch.equal(out.logprobs, whole)
    for name, parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.allclose(chunked[name], parameter.grad, rtol=1e-4, atol=1e-5), name
        assert bool(chunked[name].abs().sum() > 0), name


@pytest.mark.parametrize(
    ("prompt", "generated", "message"),
    [
        ([3, 64], [4], "sample 1: prompt id 64 at 1"),
        ([3], [4, 5, 99], "generated id 99 at 2"),
        ([-1], [4], "id -1 at 0"),
    ],
)
def test_ids_outside_the_vocabulary_are_named(
    tiny_qwen3_path: Path, prompt: list[int], generated: list[int], message: str
) -> None:
    model = load_model(tiny_qwen3_path, dtype=torch.float32, kernels=resolve_kernels(page_size=16))
    with pytest.raises(InvalidRequest, match=message):
        TrainingForward(model)([_sample([3], [63]), _sample(prompt, generated)])
