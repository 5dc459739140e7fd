"""The bridge between transformers' attention interface and the kernel set: nothing that is asked for is dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from rollout.attention import INTERFACE_NAME, PackedStep, interface_attention, register_interface
from rollout.errors import InvalidRequest, UnsupportedFeature
from tests.engines import shared_model


@dataclass
class Recording:
    """A step that notes what reaches it."""

    calls: list[tuple[int, torch.Size, torch.Size, torch.Size, float]] = field(default_factory=list)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        self.calls.append((layer, q.shape, k.shape, v.shape, scale))
        return q


def call(step: Recording | None, **changes: Any) -> tuple[torch.Tensor, None]:
    module = torch.nn.Module()
    module.layer_idx = 5  # type: ignore[assignment]
    arguments: dict[str, Any] = {
        "query": torch.arange(4 * 7 * 8.0).view(1, 4, 7, 8),
        "key": torch.zeros(1, 2, 7, 8),
        "value": torch.zeros(1, 2, 7, 8),
        "attention_mask": None,
        "scaling": 0.5,
        "attention_step": step,
    }
    arguments |= changes
    return interface_attention(
        module, *(arguments.pop(n) for n in ("query", "key", "value", "attention_mask")), **arguments
    )


def test_shapes_and_scale_are_passed_on() -> None:
    step = Recording()
    out, weights = call(step, position_ids=torch.zeros(1, 7), use_cache=False, sliding_window=None, is_causal=False)
    assert step.calls == [(5, (7, 4, 8), (7, 2, 8), (7, 2, 8), 0.5)]
    assert weights is None and torch.equal(out[0, 3, 2], torch.arange(4 * 7 * 8.0).view(4, 7, 8)[2, 3])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": 3}, "sliding_window"),
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"attention_mask": torch.ones(1, 1, 7, 7)}, "mask"),
        ({"something_new": 1}, "something_new"),
    ],
)
def test_what_the_kernel_set_cannot_do_is_refused(changes: dict[str, Any], named: str) -> None:
    step = Recording()
    with pytest.raises(UnsupportedFeature, match=named):
        call(step, **changes)
    assert step.calls == []


def test_misuse_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="attention_step"):
        call(None)
    two = {n: torch.zeros(2, 2, 7, 8) for n in ("query", "key", "value")}
    with pytest.raises(InvalidRequest, match="batch of 2"):
        call(Recording(), **two)


def test_the_model_does_not_run_without_a_step(tiny_qwen3_path: Path) -> None:
    model = shared_model(tiny_qwen3_path, torch.float32)
    with pytest.raises(InvalidRequest, match="attention_step"):
        model.hf(torch.tensor([[2, 3]]))


def decode_with_mask(path: Path, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of three packed tokens: plain, and with a padding mask handed to transformers beside the step."""
    model = shared_model(path, torch.float32)
    step = PackedStep(model.kernels, torch.tensor([0, 3], dtype=torch.int32))
    ids, positions = torch.tensor([2, 3, 4]), torch.arange(3)
    with model.kernels.invariant_mode():
        plain = model.hidden_states(ids, positions, step)
        masked = model.hf.get_decoder()(
            input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False, attention_step=step
        )
    return plain, masked.last_hidden_state[0]


def test_a_mask_that_hides_nothing_changes_nothing(tiny_qwen3_path: Path) -> None:
    plain, masked = decode_with_mask(tiny_qwen3_path, torch.ones(1, 3, dtype=torch.int64))
    assert torch.equal(plain, masked)


def test_a_mask_that_hides_a_token_is_refused(tiny_qwen3_path: Path) -> None:
    with pytest.raises(UnsupportedFeature):
        decode_with_mask(tiny_qwen3_path, torch.tensor([[0, 1, 1]]))


def test_registration_is_idempotent() -> None:
    assert register_interface() == register_interface() == INTERFACE_NAME
    assert AttentionInterface()[INTERFACE_NAME] is interface_attention
