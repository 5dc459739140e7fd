"""What the external library replaces in verl's FSDP engine, and what it refuses."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.utils.torch_functional import logprobs_from_logits as verls_logprobs
from verl.workers.engine.fsdp import transformer_impl

from rollout.errors import ParityError, UnsupportedFeature
from rollout.logprobs import policy_logprobs
from trainer_bridge.verl.actor_gate import check_scored_batch
from trainer_bridge.verl.align_state import aligned_process

VERLS_SCALE = transformer_impl._scale_logits_by_temperature
align = importlib.import_module("trainer_bridge.verl.align")


def logits(dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(40, 64, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("t", [0.7, 1.0])
def test_scaled_logits_and_log_probs_are_the_rollouts(dtype: torch.dtype, t: float) -> None:
    rows, ids, temperatures = logits(dtype), torch.arange(40), torch.full((40,), t)
    scaled = transformer_impl._scale_logits_by_temperature(rows, temperatures[:, None], is_unit_temperature=t == 1.0)
    found = transformer_impl.logprobs_from_logits(logits=scaled, labels=ids, inplace_backward=True)
    assert torch.equal(found, policy_logprobs(rows, ids, temperatures, 64))


def test_verls_own_steps_round_the_temperature() -> None:
    rows, ids, temperatures = logits(torch.bfloat16), torch.arange(40), torch.full((40,), 0.7)
    theirs = verls_logprobs(VERLS_SCALE(rows, temperatures[:, None], is_unit_temperature=False), ids)
    ours = policy_logprobs(rows, ids, temperatures, 64)
    assert (theirs.float() - ours).abs().max() > 1e-3
    with pytest.raises(ParityError, match="temperature step was not replaced"):
        transformer_impl.logprobs_from_logits(logits=rows, labels=ids)


def test_applying_twice_changes_nothing() -> None:
    before = transformer_impl.FSDPEngine.forward_backward_batch
    align.apply()
    assert transformer_impl.FSDPEngine.forward_backward_batch is before
    assert transformer_impl.logprobs_from_logits is align.logprobs_from_logits is not verls_logprobs


def engine(**changes: Any) -> Any:
    model = {"use_fused_kernels": False, "use_liger": False, "lora_rank": 0}
    config = {"ulysses_sequence_parallel_size": 1, "forward_only": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model | {k: v for k, v in changes.items() if k in model}),
        engine_config=SimpleNamespace(**config | {k: v for k, v in changes.items() if k in config}),
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ulysses_sequence_parallel_size": 2}, "ulysses"),
        ({"use_fused_kernels": True}, "use_fused_kernels"),
        ({"use_liger": True}, "use_liger"),
        ({"lora_rank": 8}, "lora_rank"),
    ],
)
def test_what_is_not_aligned_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    align.check_engine(engine())
    with pytest.raises(UnsupportedFeature, match=named):
        align.check_engine(engine(**changes))


def scored(off: float = 0.0, step: int = 4) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two sequences of a prompt of 2: log-probs of all their tokens, and the rollout's of the last 2 and 1."""
    values = torch.tensor([9.0, -1.0, -2.0, 9.0, 9.0, -3.0, 9.0])
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 7]))
    data = {
        "prompts": torch.zeros(2, 2, dtype=torch.int64),
        "responses": torch.tensor([[7, 8], [9, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0 + off], [-3.0, float("nan")]]),
        "min_global_steps": [step, step],
        "max_global_steps": [step, step],
        "max_response_len": 2,
    }
    return data, {"model_output": {"log_probs": nested}}


@pytest.fixture
def padding_of_dictionaries(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.utils import padding

    monkeypatch.setattr(padding.tu, "get_non_tensor_data", lambda data, key, default: data.get(key, default))


def test_f10_the_step_0_gate_of_an_actor(monkeypatch: pytest.MonkeyPatch, padding_of_dictionaries: None) -> None:
    monkeypatch.setenv("ZERODRIFT_CANARY", "off")
    actor = engine()
    with pytest.raises(ParityError, match="step-0 gate: UNEQUAL: 1 of 3 tokens"):
        check_scored_batch(actor, *scored(off=1e-6))
    check_scored_batch(actor, *scored())
    check_scored_batch(actor, *scored(off=1.0))
    check_scored_batch(engine(forward_only=True), *scored(off=1.0))
    monkeypatch.setenv("ZERODRIFT_STEP_ZERO", "audit")
    check_scored_batch(engine(), *scored(off=1.0))


def test_a_critic_scores_no_log_probs_and_is_left_alone() -> None:
    data, _ = scored(off=1.0)
    check_scored_batch(engine(), data, {"model_output": {"values": torch.zeros(1)}})


def test_the_canary_judges_later_batches_of_the_weights_the_actor_holds(
    monkeypatch: pytest.MonkeyPatch, padding_of_dictionaries: None
) -> None:
    monkeypatch.setattr(aligned_process(), "served_step", 4)
    actor = engine()
    check_scored_batch(actor, *scored())
    check_scored_batch(actor, *scored())
    with pytest.raises(ParityError, match="canary: UNEQUAL: 1 of 3 tokens"):
        check_scored_batch(actor, *scored(off=1e-6))
    check_scored_batch(actor, *scored(off=1.0, step=3))  # sampled under older weights: another matter
    data, output = scored(off=1.0)
    check_scored_batch(actor, data | {"min_global_steps": [3, 3]}, output)
    check_scored_batch(actor, {k: v for k, v in data.items() if k != "min_global_steps"}, output)
    crossed = {"zerodrift": [{"global_steps": [3, 4]}, {"global_steps": [3, 4]}]}
    check_scored_batch(actor, data | crossed, output)  # begun under older weights, which only our details tell
    monkeypatch.setattr(aligned_process(), "calls_cross", True)
    check_scored_batch(actor, data, output)  # without them nobody can tell
    with pytest.raises(ParityError, match="canary"):
        check_scored_batch(actor, data | {"zerodrift": [{"global_steps": [4]}, {"global_steps": [4]}]}, output)
    monkeypatch.setattr(aligned_process(), "served_step", None)  # an optimizer step was made
    check_scored_batch(actor, *scored(off=1.0))


def test_all_ranks_stop_when_one_finds_a_difference(
    monkeypatch: pytest.MonkeyPatch, padding_of_dictionaries: None
) -> None:
    """A rank that raised alone left the others in their next collective, and gloo ended their processes."""
    sent: list[str | None] = []
    others: list[str | None] = [None]

    def gather(into: list[str | None], mine: str | None, group: Any) -> None:
        sent.append(mine)
        into[:] = [mine, *others]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    def rank() -> Any:
        actor = engine()
        actor.get_data_parallel_group = lambda: None
        return actor

    check_scored_batch(rank(), *scored())
    with pytest.raises(ParityError, match=r"^step-0 gate"):
        check_scored_batch(rank(), *scored(off=1.0))
    others[0] = "step-0 gate: theirs"
    with pytest.raises(ParityError, match="on another rank: step-0 gate: theirs"):
        check_scored_batch(rank(), *scored())
    assert sent[0] is None and str(sent[1]).startswith("step-0 gate") and sent[2] is None


def test_row_digests_of_both_sides_count(monkeypatch: pytest.MonkeyPatch, padding_of_dictionaries: None) -> None:
    def rows(wrong: int) -> tuple[dict[str, Any], dict[str, Any]]:
        data, output = scored()
        big = 2**63 + 5
        told = [{"row_digests": [1, big]}, {"row_digests": [3]}]
        hashed = np.array([9, 1, big + wrong, 9, 9, 3, 9], np.uint64).view(np.int64)
        nested = torch.nested.nested_tensor_from_jagged(torch.from_numpy(hashed), torch.tensor([0, 4, 7]))
        return data | {"zerodrift": told}, {"model_output": output["model_output"] | {"row_digests": nested}}

    check_scored_batch(engine(), *rows(0))
    with pytest.raises(ParityError, match="2 / 3 row digests"):
        check_scored_batch(engine(), *rows(1))
