"""Joining turns conserves every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.errors import InvalidRequest, ParityError
from rollout.types import FinishReason, LogprobMode, SamplingParams, VersionSpan
from tests.trainer_bridge.samples import f32, i32, record
from trainer_bridge.compare import compare
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.turns import check_prefix, merge_turns

TOOL = ([91, 92], [93])


def conversation(**last: Any) -> list[RolloutRecord]:
    """3 turns of 4 tokens with 2 and 1 tool tokens between."""
    turns, prompt = [], [1, 2, 3]
    for k in range(3):
        tokens = list(range(10 * (k + 1), 10 * (k + 1) + 4))
        logprobs = [-(k + 1) - i / 8 for i in range(4)]
        changes = last if k == 2 else {}
        turns.append(record(logprobs, prompt, tokens, spans=(VersionSpan(k, 0, 4),), replica=f"w{k % 2}", **changes))
        prompt = prompt + tokens + (TOOL[k] if k < 2 else [])
    return turns


def test_c1_exact_prefixes_pass() -> None:
    check_prefix(conversation())


def test_c1_retokenised_text_is_refused_with_the_first_differing_index() -> None:
    # pieces a = 10, b = 11, ab = 12: sampled [a, b], sent back as [ab] + tool
    first = record([-1.0, -1.0], prompt=[1, 2], tokens=[10, 11])
    again = record([-1.0], prompt=[1, 2, 12, 99, 98], tokens=[13])
    with pytest.raises(
        ParityError, match=r"turn 1's prompt differs from turn 0's ids first at index 2: id 12 instead of 10"
    ):
        check_prefix([first, again])


def test_c1_a_prompt_that_ends_early_is_refused() -> None:
    with pytest.raises(ParityError, match="first differing index is 3, where id 11 is missing"):
        check_prefix([record([-1.0, -1.0], [1, 2], [10, 11]), record([-1.0], [1, 2, 10], [13])])


def test_c9_no_token_is_lost_in_a_merge() -> None:
    turns = conversation()
    merged = merge_turns(turns)
    assert merged.token_ids.size == 3 * 4 + 3
    assert int(merged.mask.sum()) == sum(turn.token_ids.size for turn in turns)
    assert merged.token_ids.tolist() == [10, 11, 12, 13, 91, 92, 20, 21, 22, 23, 93, 30, 31, 32, 33]
    assert merged.mask.astype(int).tolist() == [1] * 4 + [0] * 2 + [1] * 4 + [0] + [1] * 4
    assert np.isnan(merged.policy_logprobs[~merged.mask]).all()
    kept = merged.policy_logprobs[merged.mask]
    assert kept.tobytes() == np.concatenate([turn.policy_logprobs for turn in turns]).tobytes()
    assert merged.prompt_ids.tolist() == [1, 2, 3]
    assert merged.spans == (VersionSpan(0, 0, 4), VersionSpan(1, 6, 10), VersionSpan(2, 11, 15))
    assert merged.replica == "w0,w1"


def test_c9_a_cap_refuses_and_never_cuts() -> None:
    with pytest.raises(InvalidRequest, match="15 tokens, the limit is 4"):
        merge_turns(conversation(), max_tokens=4)
    assert merge_turns(conversation(), max_tokens=15).token_ids.size == 15


def test_k4_the_last_turns_finish_reason_is_the_rows() -> None:
    assert merge_turns(conversation(finish=FinishReason.ABORTED)).finish is FinishReason.ABORTED
    assert merge_turns(conversation()).finish is FinishReason.LENGTH


def test_j5_a_merged_row_compares_over_model_tokens_only() -> None:
    merged = merge_turns(conversation())
    trainer = np.where(merged.mask, merged.policy_logprobs, np.float32(-7.0))
    result = compare([merged.scored(trainer)])
    assert result.bitwise_equal and result.tokens == 12


def test_optional_values_survive_only_if_every_turn_has_them() -> None:
    digests = np.arange(4, dtype=np.uint64)
    assert merge_turns(conversation(row_digests=digests)).row_digests is None
    whole = [
        record([-1.0], [1], [2], row_digests=digests[:1]),
        record([-1.0], [1, 2, 9], [3], row_digests=digests[1:2]),
    ]
    merged = merge_turns(whole)
    assert merged.row_digests is not None and merged.row_digests.tolist() == [0, 0, 1]
    behaving = [record([-1.0], [1], [2], behavior_logprobs=f32([-1.0])) for _ in range(1)]
    assert merge_turns(behaving).behavior_logprobs is not None


def test_other_seeds_leave_the_row_without_one_but_another_temperature_is_refused() -> None:
    merged = merge_turns(conversation(seed=9, sampling=SamplingParams(seed=9, max_tokens=4)))
    assert merged.seed is None and merged.sampling == SamplingParams()
    with pytest.raises(ParityError, match="turn 2 has sampling"):
        merge_turns(conversation(sampling=SamplingParams(temperature=0.5)))
    with pytest.raises(ParityError, match="turn 2 has mode"):
        merge_turns(conversation(mode=LogprobMode.GREEDY_T1))


def test_one_turn_is_itself_and_none_is_refused() -> None:
    one = conversation()[0]
    merged = merge_turns([one])
    assert np.array_equal(merged.token_ids, one.token_ids) and merged.mask.all() and merged.seed == 7
    assert merged.token_ids.dtype == i32([0]).dtype
    with pytest.raises(InvalidRequest, match="no turns"):
        merge_turns([])
