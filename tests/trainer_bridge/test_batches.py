"""Scored samples out of arrays, verl's padded batches and verl's nested tensors; pads never enter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.errors import InvalidRequest
from rollout.types import VersionSpan
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
