"""Replay: a stored sample comes back bit for bit, and a changed record is told where it differs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rollout.errors import InvalidRequest
from rollout.types import FinishReason, VersionSpan
from tests.services import sampling, tiny_service
from trainer_bridge.collect import records_of
from trainer_bridge.replay import compare_replay, replay_records, replay_request
from trainer_bridge.rollout_record import RolloutRecord


async def test_replay(tiny_qwen3_path: Path) -> None:
    """Siblings, filters, greedy; digests where they were recorded; another service, another batch."""
    async with tiny_service(tiny_qwen3_path) as (_, client):
        kinds = ({}, {"top_k": 5, "temperature": 0.7}, {"temperature": 0.0})
        results = [
            await client.generate([3, 4, 5, i], sampling(seed=i, max_tokens=9, **kind), n=2, row_digests=i == 0)
            for i, kind in enumerate(kinds)
        ]
        digest = (await client.info()).weights.digest
    records = records_of(results)
    async with tiny_service(tiny_qwen3_path) as (service, _):
        again = await replay_records(records, service.address, weights_digest=digest)
        assert [r.equal for r in again] == [True] * 6 and not any(r.warning for r in again)
        with pytest.raises(InvalidRequest, match="were sampled under"):
            await replay_records(records, service.address, weights_digest="ab")
        spoiled = dataclasses.replace(records[1], seed=99)
        (other,) = await replay_records([spoiled], service.address)
        assert not other.equal and other.position is not None


def record(**changes: object) -> RolloutRecord:
    fields = {
        "request_id": "r",
        "sample_index": 0,
        "prompt_ids": np.array([3, 4], np.int32),
        "token_ids": np.array([5, 6, 7], np.int32),
        "policy_logprobs": np.array([-1.0, -2.0, -3.0], np.float32),
        "mask": np.ones(3, np.bool_),
        "finish": FinishReason.LENGTH,
        "seed": 1,
        "sampling": sampling(max_tokens=3),
        "mode": None,
        "row_digests": np.array([1, 2, 3], np.uint64),
    }
    return RolloutRecord(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "position", "said"),
    [
        (
            {"policy_logprobs": np.array([-1.0, np.nextafter(np.float32(-2), np.float32(0)), -3], np.float32)},
            1,
            "1 ULP",
        ),
        ({"token_ids": np.array([5, 6, 8], np.int32)}, 2, "id 7 became 8"),
        ({"row_digests": np.array([1, 9, 3], np.uint64)}, 1, "logits row differs"),
        ({"finish": FinishReason.STOP}, None, "ended by length, now by stop"),
    ],
)
def test_where_it_differs(change: dict[str, object], position: int | None, said: str) -> None:
    result = compare_replay(record(), record(**change))
    assert not result.equal and result.position == position and said in result.difference
    assert compare_replay(record(), record()).equal


def test_lengths_and_aborted_records() -> None:
    longer = record(
        token_ids=np.array([5, 6, 7, 8], np.int32), policy_logprobs=np.array([-1, -2, -3, -4], np.float32),
        mask=np.ones(4, np.bool_), row_digests=None,
    )  # fmt: skip
    assert compare_replay(record(row_digests=None), longer).difference == "3 tokens became 4"
    aborted = record(row_digests=None, finish=FinishReason.ABORTED)
    assert compare_replay(aborted, longer).equal
    assert replay_request(aborted, 0).sampling.max_tokens == 3


def test_surroundings_are_told() -> None:
    result = compare_replay(
        record(weight_version=1, manifest_digest="a"), record(weight_version=2, manifest_digest="b")
    )
    assert "manifest a" in result.warning and "v1, replayed under v2" in result.warning


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampling": None}, "sampling parameters"),
        ({"seed": None}, "seed"),
        ({"mask": np.array([1, 0, 1], np.bool_)}, "mask 0"),
        ({"spans": (VersionSpan(1, 0, 2), VersionSpan(2, 2, 3))}, r"versions \[1, 2\]"),
    ],
)
def test_what_cannot_be_regenerated_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        replay_request(record(**change), 0)
