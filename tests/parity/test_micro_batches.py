"""The trainer's side alone: micro-batches, order, neighbours and padding change no bit (J7, H5, I6)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.errors import InvalidRequest
from rollout.model import SharedModel
from tests.engines import (
    build_engine,
    fresh_model,
    isolated,
    random_prompt,
    run,
    sample,
    torch_threads,
    train_forward,
    unequal,
)
from trainer_bridge.contrast import OrdinaryTrainer
from trainer_bridge.forward import TrainingForward, TrainingSample, pack, unpad

PROMPTS, GENERATED = (3, 1, 40, 17, 128, 5, 64, 9), (5, 20, 3, 12, 1, 33, 8, 16)


def rows() -> list[TrainingSample]:
    return [
        TrainingSample(
            np.array(random_prompt(p, i), np.int32), np.array(random_prompt(g, 50 + i), np.int32), 0.5 + 0.1 * i
        )
        for i, (p, g) in enumerate(zip(PROMPTS, GENERATED, strict=True))
    ]


def bits(model: SharedModel, samples: list[TrainingSample], micro_batch: int) -> list[tuple[bytes, list[int]]]:
    return [(p.tobytes(), d.tolist()) for p, d in train_forward(model, samples, micro_batch=micro_batch)]


def test_eight_rows_in_any_micro_batch(model: SharedModel) -> None:
    """J7: 1x8, 2x4, 4x2, 8x1, and a ragged 3."""
    together = bits(model, rows(), 8)
    for micro_batch in (1, 2, 3, 4):
        assert bits(model, rows(), micro_batch) == together
    with torch_threads(2):
        assert bits(model, rows(), 8) == together
    assert bits(model, rows()[::-1], 3)[::-1] == together


def test_an_ordinary_trainer_depends_on_the_micro_batch(model: SharedModel) -> None:
    """Negative control: padded SDPA scores the same rows differently in other company."""
    ordinary = OrdinaryTrainer(model)
    said = [ordinary.logprobs(rows(), micro_batch=m, threads=1) for m in (1, 2, 8)]
    assert any(unequal(a, b) for other in said[1:] for a, b in zip(said[0], other, strict=True))


def test_a_packed_neighbour_is_invisible(model: SharedModel) -> None:
    """H5: [A(3), B(4)]; changing A's ids leaves B's bits, also against B alone."""

    def two(first: tuple[int, ...]) -> list[TrainingSample]:
        b = TrainingSample(np.array([7, 8], np.int32), np.array([9, 10], np.int32))
        return [TrainingSample(np.array(first[:2], np.int32), np.array(first[2:], np.int32)), b]

    packed = bits(model, two((2, 3, 4)), 2)
    changed = bits(model, two((40, 41, 42)), 2)
    alone = bits(model, two((2, 3, 4))[1:], 1)
    assert packed[1] == changed[1] == alone[0]
    assert packed[0] != changed[0]


def test_one_sequence_instead_of_two_is_caught(model: SharedModel) -> None:
    """Negative control of H5: without the border between A and B, B sees A."""
    first, second = (2, 3, 4), (7, 8, 9, 10)
    apart = train_forward(model, [TrainingSample(np.array(second[:2], np.int32), np.array(second[2:], np.int32))])
    joined = train_forward(
        model, [TrainingSample(np.array((*first, *second[:2]), np.int32), np.array(second[2:], np.int32))]
    )
    assert unequal(apart[0][0], joined[0][0]) == 2


# ---- padding (I6) -----------------------------------------------------------------------------------------------


def padded(samples: list[TrainingSample], left: int, right: int) -> list[TrainingSample]:
    """Through a rectangular batch with pads on both sides and back."""
    width = left + max(len(s.prompt_ids) + len(s.token_ids) for s in samples) + right
    ids, mask, response = (torch.zeros(len(samples), width, dtype=torch.int64) for _ in range(3))
    for b, s in enumerate(samples):
        whole = np.concatenate((s.prompt_ids, s.token_ids))
        at = slice(left, left + len(whole))
        ids[b, at], mask[b, at] = torch.from_numpy(whole).long(), 1
        response[b, left + len(s.prompt_ids) : left + len(whole)] = 1
    return unpad(ids, mask, response, samples[0].temperature)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 0), (2, 3), (3, 0)])
def test_pads_change_nothing(model: SharedModel, left: int, right: int) -> None:
    samples = [dataclasses.replace(s, temperature=0.9) for s in rows()[:4]]
    again = padded(samples, left, right)
    assert [s.prompt_ids.tolist() for s in again] == [s.prompt_ids.tolist() for s in samples]
    assert bits(model, again, 4) == bits(model, samples, 4)


def test_positions_count_real_tokens_only(qwen3: SharedModel) -> None:
    """For us a shift would also change the draw: the position is part of the sampling key."""
    (one,) = padded([rows()[2]], 3, 0)
    batch = pack([one])
    assert batch.positions.tolist() == list(range(43)) and batch.cu_seqlens.tolist() == [0, 43]
    prompt = tuple(int(t) for t in one.prompt_ids)
    drawn = isolated(qwen3, sample(prompt))
    shifted = isolated(qwen3, sample((0, 0, 0, *prompt)))
    assert drawn.token_ids != shifted.token_ids
    assert run(build_engine(qwen3), [sample(prompt)])["s"].bits() == drawn.bits()


@pytest.mark.parametrize(
    ("mask", "response"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([1, 1, 1, 1], [0, 1, 0, 1]),
        ([1, 1, 1, 1], [0, 1, 1, 0]),
        ([1, 1, 1, 0], [0, 0, 1, 1]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_masks_that_do_not_say_what_was_generated_are_refused(mask: list[int], response: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="row 0") as caught:
        unpad(torch.tensor([[5, 6, 7, 8]]), torch.tensor([mask]), torch.tensor([response]))
    assert caught.value.field == "response_mask"


def test_empty_rows_are_refused(qwen3: SharedModel) -> None:
    empty, one = np.empty(0, np.int32), np.array([3], np.int32)
    for samples in ([], [TrainingSample(empty, one)], [TrainingSample(one, empty)]):
        with pytest.raises(InvalidRequest):
            TrainingForward(qwen3)(samples)


def test_gradients_reach_every_parameter_and_keep_the_forward(tiny_qwen3_path: Path) -> None:
    model = fresh_model(tiny_qwen3_path, torch.float32, trainable=True)
    forward = TrainingForward(model)
    with forward.aligned():
        out = forward(rows(), digests=True)
        out.logprobs.sum().backward()
    grads = [p.grad for _, p in model.parameters()]
    assert all(g is not None and bool(g.isfinite().all()) and bool((g != 0).any()) for g in grads)
    without = train_forward(model, rows())
    assert [t.detach().numpy().tobytes() for t in out.split()] == [p.tobytes() for p, _ in without]
