"""Arguments of the clients' calls: taken as what they are, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.errors import InvalidRequest
from rollout.types import SamplingParams, ScoreSequence, UpdatePolicy
from trainer_bridge.wire import plan_update, update_messages
from trainer_bridge.wire.request import abort_target, make_request, make_score_request

SAMPLING = SamplingParams(seed=1, max_tokens=3)


@pytest.mark.parametrize("name", ["n", "sample_index", "top_logprobs", "priority"])
@pytest.mark.parametrize("value", [2.0, "2", True, None])
def test_options_that_count(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}.* is {value!r}, must be an integer"):
        make_request([3], SAMPLING, {name: value})  # type: ignore[misc]
    request, _ = make_request([3], SAMPLING, {name: np.int64(2)})  # type: ignore[misc]
    assert getattr(request, name) == 2 and type(getattr(request, name)) is int


@pytest.mark.parametrize("name", ["seed", "max_tokens", "top_k"])
def test_integers_of_the_sampling(name: str) -> None:
    given: dict[str, Any] = {name: np.int64(2)}
    request, _ = make_request([3], SamplingParams(**given), {})
    assert request == make_request([3], SamplingParams(**{name: 2}), {})[0]  # type: ignore[arg-type]
    assert type(getattr(request.sampling, name)) is int
    for value in (2.0, True, "2"):
        given = {name: value}
        with pytest.raises(InvalidRequest, match=f"sampling.{name}.* is {value!r}, must be an integer"):
            make_request([3], SamplingParams(**given), {})


def test_what_was_not_given_stays_so() -> None:
    request, _ = make_request([3], SamplingParams(), {})
    assert request.sampling == SamplingParams()


def test_records_that_are_none() -> None:
    with pytest.raises(InvalidRequest, match="sampling is a dict"):
        make_request([3], {"seed": 1}, {})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="is one ScoreSequence; send a list"):
        make_score_request(ScoreSequence((3, 4)), {})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"sequences\[0\] is a list; build"):
        make_score_request([[3, 4]], {})  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="an id is a string"):
        abort_target(5, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", [(3.0, 4), (True, 4), ("3", 4), np.array([[3, 4]]), None])
def test_ids_to_score(row: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"sequences\[1\]\.tokens\.ids"):
        make_score_request([ScoreSequence((3, 4)), ScoreSequence(row)], {})
    request = make_score_request([ScoreSequence(np.array([3, 4]))], {})  # type: ignore[arg-type]
    assert request.sequences[0].token_ids == (3, 4)


def test_an_updates_policy_and_bucket() -> None:
    tensors = [("a", np.zeros(2, np.float32))]
    with pytest.raises(InvalidRequest, match=r"policy = 'wait' is no UpdatePolicy; use UpdatePolicy.WAIT"):
        plan_update(tensors, version=1, digest=None, policy="wait")  # type: ignore[arg-type]
    update = plan_update(tensors, version=1, digest=None, policy=UpdatePolicy.WAIT)
    for odd in (0, 1e6):
        with pytest.raises(InvalidRequest, match=f"bucket_bytes = {odd} must be"):
            update_messages(update, tensors, odd)  # type: ignore[arg-type]
