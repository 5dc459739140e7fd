"""Scored samples out of arrays, verl's padded batches and verl's nested tensors; pads never enter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.errors import InvalidRequest, ParityError
from rollout.types import LogprobMode, VersionSpan
from tests.trainer_bridge.samples import f32
from trainer_bridge.batches import column, samples_from_arrays, samples_from_dataproto, samples_from_nested
from trainer_bridge.compare import compare

NAN = float("nan")


def dataproto(pad: float = NAN, **changes: Any) -> SimpleNamespace:
    """Two rows as verl pads them: prompts on the left, responses on the right, a tool token in the second."""
    batch = {
        "prompts": torch.tensor([[0, 5, 6], [7, 8, 9]]),
        "responses": torch.tensor([[20, 21, 0, 0], [30, 31, 32, 33]]),
        "response_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0, 0], [1] * 7]),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0, pad, pad], [-0.5, pad, -0.25, -3.0]]),
        "old_log_probs": torch.tensor([[-1.0, -2.0, pad, pad], [-0.5, pad, -0.25, -3.0]]),
    }
    details = [
        {"seed": 1, "spans": [(3, 0, 2)], "replica": "r0", "filtered": False},
        {"seed": 2, "spans": [(3, 0, 1)], "replica": "r1", "filtered": True, "behavior_logprobs": [-0.5]},
    ]
    columns = {"uid": np.array(["u", "v"], object), "zerodrift": np.array(details, object)}
    return SimpleNamespace(batch=batch | changes, non_tensor_batch=columns, meta_info={"temperature": 0.7})


def test_a_padded_batch_becomes_its_real_tokens() -> None:
    first, second = samples_from_dataproto(dataproto())
    assert first.prompt_ids.tolist() == [5, 6] and first.token_ids.tolist() == [20, 21]
    assert second.token_ids.size == 4 and second.mask.tolist() == [True, False, True, True]
    assert (first.request_id, first.seed, first.replica, first.temperature) == ("u/0", 1, "r0", 0.7)
    assert first.spans == (VersionSpan(3, 0, 2),)
    # The second row has two turns, and verl keeps the first turn's details only: versions are then unknown.
    assert second.spans == () and second.behavior_logprobs is None and second.filtered
    assert compare([first, second]).bitwise_equal and compare([first, second]).tokens == 5


@pytest.mark.parametrize("pad", [NAN, 0.0, float("inf"), -7.0])
def test_j5_pads_and_tool_tokens_change_no_figure(pad: float) -> None:
    assert repr(compare(samples_from_dataproto(dataproto(pad)))) == repr(compare(samples_from_dataproto(dataproto())))


def test_one_real_token_off_is_seen() -> None:
    data = dataproto()
    data.batch["old_log_probs"][1, 3] = torch.nextafter(torch.tensor(-3.0), torch.tensor(0.0))
    found = compare(samples_from_dataproto(data))
    assert found.unequal_tokens == 1 and found.first_mismatch is not None
    assert (found.first_mismatch.request_id, found.first_mismatch.position, found.first_mismatch.ulp) == ("v/1", 3, 1)


def test_nested_rows_give_the_same_comparison() -> None:
    data = dataproto()
    lengths = (2, 4)
    names = ("old_log_probs", "rollout_log_probs", "response_mask", "responses")
    fields = {
        name: torch.nested.nested_tensor(
            [row[:n] for row, n in zip(data.batch[name], lengths, strict=True)], layout=torch.jagged
        )
        for name in names
    }
    nested = samples_from_nested(fields, temperature=0.7)
    padded = samples_from_dataproto(data)
    assert [s.token_ids.tolist() for s in nested] == [s.token_ids.tolist() for s in padded]
    assert compare(nested).tokens == compare(padded).tokens == 5 and compare(nested).bitwise_equal


def test_row_digests_of_both_sides_count_in_both_layouts() -> None:
    data = dataproto()
    big = 2**64 - 7
    data.non_tensor_batch["zerodrift"][0]["row_digests"] = [big, 5]
    data.batch["row_digests"] = torch.tensor([[big - 2**64, 5, 0, 0], [1, 2, 3, 4]])
    nested: dict[str, Any] = {
        name: [row[:n] for row, n in zip(data.batch[name], (2, 4), strict=True)]
        for name in ("old_log_probs", "rollout_log_probs", "response_mask", "responses", "row_digests")
    }
    nested |= {name: data.non_tensor_batch[name] for name in ("zerodrift", "uid")}
    for samples in (samples_from_dataproto(data), samples_from_nested(nested, temperature=0.7)):
        found = compare(samples)
        # The second row has two turns, and verl keeps the first turn's digests only.
        assert found.bitwise_equal and found.digests_equal == found.digests_total == 2
        assert (samples[0].request_id, samples[0].seed, samples[0].replica) == ("u/0", 1, "r0")
    data.batch["row_digests"][0, 1] += 1
    assert compare(samples_from_dataproto(data)).digests_equal == 1


def test_extra_fields_are_found_as_columns_or_together() -> None:
    """V0 makes a column of each, V1 keeps them in one dictionary a row."""
    rows = [{"zerodrift": {"seed": 4}, "min_global_steps": 2}, {"zerodrift": {"seed": 5}, "min_global_steps": 3}]
    apart = {name: np.array([row[name] for row in rows], object) for name in rows[0]}
    for data in (apart, {"extra_fields": rows}):
        assert column(data, "min_global_steps") == [2, 3]
        assert column(data, "zerodrift") == [{"seed": 4}, {"seed": 5}]
        assert column(data, "nonesuch") is None
    assert column({"extra_fields": [None, {"a": 0}]}, "a") == [None, 0] and column({}, "a") is None
    assert column({"a": torch.tensor([1, 2])}, "a") == [1, 2]


def test_arrays_of_any_engine() -> None:
    rows = [f32([-1.0, -2.0]), f32([-3.0])]
    samples = samples_from_arrays(rows, rows, [[1, 0], [1]], temperature=0.0)
    assert compare(samples).tokens == 2 and samples[1].request_id == "row-1"


def test_what_is_missing_is_named() -> None:
    data = dataproto()
    del data.batch["rollout_log_probs"]
    with pytest.raises(InvalidRequest, match="lacks rollout_log_probs"):
        samples_from_dataproto(data)
    data = dataproto()
    data.meta_info = {}
    with pytest.raises(InvalidRequest, match="temperature"):
        samples_from_dataproto(data)
    with pytest.raises(InvalidRequest, match="1 in trainer, 2 in rollout"):
        samples_from_arrays([f32([-1.0])], [f32([-1.0])] * 2, [[1]], temperature=1.0)
    with pytest.raises(InvalidRequest, match="float64"):
        samples_from_arrays([np.array([-1.0])], [f32([-1.0])], [[1]], temperature=1.0)


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, NAN])
def test_j5_a_mask_is_0_or_1(value: float) -> None:
    """Anything else was taken for 1."""
    with pytest.raises(InvalidRequest, match="mask holds"):
        samples_from_arrays([f32([-1.0, -2.0])], [f32([-1.0, -2.0])], [[value, 1]], temperature=1.0)
    marks = torch.tensor([[1.0, value, 0, 0], [1, 0, 1, 1]])
    with pytest.raises(InvalidRequest, match="mask holds"):
        samples_from_dataproto(dataproto(response_mask=marks))
    assert samples_from_dataproto(dataproto(response_mask=torch.tensor([[1.0, 1, 0, 0], [1, 0, 1, 1]])))[0].mask.all()


def test_a_marked_pad_is_no_token_that_may_be_dropped() -> None:
    marks = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])
    with pytest.raises(InvalidRequest, match="row 0: response_mask marks token 2, which attention_mask calls a pad"):
        samples_from_dataproto(dataproto(response_mask=marks))


def test_responses_padded_on_the_left_keep_their_tokens() -> None:
    """The first tokens of the row were taken, which are pads, and the last ones lost."""
    left, data = dataproto(), dataproto()
    for name in ("responses", "response_mask", "rollout_log_probs", "old_log_probs"):
        left.batch[name] = torch.cat((data.batch[name][:1].roll(2, dims=1), data.batch[name][1:]))
    left.batch["attention_mask"] = torch.tensor([[0, 1, 1, 0, 0, 1, 1], [1] * 7])
    assert repr(compare(samples_from_dataproto(left))) == repr(compare(samples_from_dataproto(data)))
    assert samples_from_dataproto(left)[0].token_ids.tolist() == [20, 21]


@pytest.mark.parametrize("name", ["rollout_log_probs", "old_log_probs", "response_mask", "responses", "attention_mask"])
@pytest.mark.parametrize("axis", [0, 1])
def test_c6_a_tensor_of_another_size_is_refused_and_not_cut(name: str, axis: int) -> None:
    data = dataproto()
    value = data.batch[name]
    data.batch[name] = torch.cat((value, value.narrow(axis, 0, 1)), dim=axis)
    with pytest.raises(InvalidRequest, match=r"has the shape .* nothing is padded or cut"):
        samples_from_dataproto(data)


@pytest.mark.parametrize("given", ["token_ids", "prompt_ids", "details", "names"])
def test_too_few_of_anything_is_told(given: str) -> None:
    row = f32([-1.0])
    with pytest.raises(InvalidRequest, match=f"2 in masks, 1 in {given}"):
        samples_from_arrays([row] * 2, [row] * 2, [[1]] * 2, temperature=1.0, **{given: [[1]]})  # type: ignore[arg-type]


def test_ids_and_casts_are_refused_by_name() -> None:
    row = f32([-1.0, -2.0])
    for ids in ([1.7, 2.0], [2**33 + 1, 2]):
        with pytest.raises(InvalidRequest, match="token_ids"):
            samples_from_arrays([row], [row], [[1, 1]], temperature=1.0, token_ids=[ids])
    data = dataproto()
    data.batch["old_log_probs"] = data.batch["old_log_probs"].bfloat16()
    with pytest.raises(InvalidRequest, match=r"old_log_probs is torch\.bfloat16, must be float32"):
        samples_from_dataproto(data)
    data = dataproto()
    data.batch["old_log_probs"].requires_grad_()
    assert repr(compare(samples_from_dataproto(data))) == repr(compare(samples_from_dataproto(dataproto())))


def test_a2_what_the_rollout_says_of_its_temperature_is_heeded() -> None:
    """verl names the trainer's for the whole batch; a sample of another one was compared under that label."""
    row, mask = [f32([-1.0])], [[1]]

    def made(trainer: float | None, said: float | None, **more: Any) -> Any:
        told = {} if said is None else {"temperature": said}
        return samples_from_arrays(row, row, mask, temperature=trainer, details=[told | more])[0]

    for trainer, said in ((1.0, 0.7), (0.7, 1.0), (0.7, 0.0), (0.0, 0.7)):
        with pytest.raises(ParityError, match="was sampled at temperature"):
            made(trainer, said)
    assert made(0.7, float(np.float32(0.7))).temperature == 0.7
    assert made(None, 0.7).temperature == 0.7 and made(0.7, None).temperature == 0.7
    greedy = made(1.0, 0.0)
    assert (greedy.mode, greedy.temperature) == (LogprobMode.GREEDY_T1, 0.0)
    with pytest.raises(InvalidRequest, match="no temperature is known"):
        made(None, None)
    with pytest.raises(ParityError, match="the rollout says that its log-probs are raw"):
        made(1.0, 1.0, mode="raw")
    data = dataproto()
    data.non_tensor_batch["zerodrift"][1]["temperature"] = 1.0
    with pytest.raises(ParityError, match=r"'v/1' sample 0 was sampled at temperature 1, the trainer scored at 0\.7"):
        samples_from_dataproto(data)


def test_probabilities_are_no_log_probs() -> None:
    row, real = f32([0.01, 0.5]), f32([-1.0, -0.5])
    for ours, theirs, side in ((row, real, "trainer"), (real, row, "rollout")):
        with pytest.raises(InvalidRequest, match=f"{side}_logprobs is 0.5 at position 1.*probabilities"):
            samples_from_arrays([ours], [theirs], [[1, 1]], temperature=1.0)
        assert samples_from_arrays([ours], [theirs], [[1, 0]], temperature=1.0)[0].mask.sum() == 1


def test_a_log_prob_that_somebodys_rounding_made_positive_is_compared() -> None:
    """A trainer whose head is bfloat16 has such; to refuse the batch would hide what it is compared for."""
    (sample,) = samples_from_arrays([f32([-1.0, 0.25])], [f32([-1.0, -0.5])], [[1, 1]], temperature=1.0)
    assert sample.trainer_logprobs[1] == 0.25
    # What bfloat16 logits may leave above 0.
    assert samples_from_arrays([f32([0.1])], [f32([0.1])], [[1]], temperature=1.0)
