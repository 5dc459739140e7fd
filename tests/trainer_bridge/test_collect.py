"""Records from results, and the digest over everything sampled."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from rollout.types import FinishDetail, FinishReason, LogprobMode, SamplingParams, TopLogprobs, VersionSpan
from trainer_bridge.collect import TokenDigest, records_of, training_sample
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.wire import GenerateResult, SampledSequence
from trainer_bridge.wire.result import PromptScore


def _result(salt: float = 0.0) -> GenerateResult:
    logprobs = np.array([-0.5, -1.5 - salt], np.float32)
    sample = SampledSequence(
        0, np.array([4, 1], np.int32), logprobs, logprobs, None, np.ones(2, np.uint8),
        FinishDetail(FinishReason.STOP, stop_token_id=1), (VersionSpan(3, 0, 2),), "x", "r0",
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.5, seed=9, max_tokens=5)
    return GenerateResult("q", (7, 8), (sample,), sampling, LogprobMode.TEMPERED, "m")


def test_records_keep_everything() -> None:
    (record,) = records_of([_result()])
    assert (record.request_id, record.seed, record.weight_version, record.replica) == ("q", 9, 3, "r0")
    assert record.finish is FinishReason.STOP and record.token_ids.tolist() == [4, 1]
    sample = training_sample(record)
    assert sample.prompt_ids.tolist() == [7, 8] and sample.temperature == 0.5


def test_a_record_keeps_every_field_that_the_client_receives() -> None:
    """A field that is new in the result must reach the record, or be left out here by name."""
    renamed = {"prompt": "prompt_score"}
    left_out = {"text", "num_cached_tokens", "samples"}
    kept = {field.name for field in fields(RolloutRecord)}
    for source in (SampledSequence, GenerateResult):
        names = {renamed.get(field.name, field.name) for field in fields(source)} - left_out
        assert names <= kept, names - kept
    top = TopLogprobs(np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32))
    prompt = PromptScore(np.array([-0.5], np.float32), 3, None, None)
    result = _result()
    result = replace(result, samples=(replace(result.samples[0], top=top),), prompt=prompt)
    (record,) = records_of([result])
    assert record.top is top and record.prompt_score is prompt


def test_the_digest_knows_every_bit_and_the_order() -> None:
    def digest(*salts: float) -> str:
        state = TokenDigest()
        for salt in salts:
            state.add(records_of([_result(salt)]))
        return state.hex

    assert digest(0.0, 1.0) == digest(0.0, 1.0)
    assert len({digest(0.0, 1.0), digest(1.0, 0.0), digest(0.0), digest(1e-7, 1.0)}) == 4
