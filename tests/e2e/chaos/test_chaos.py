"""Twenty seeded fault schedules against real Ray and gRPC, and proof that the verdict can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.types import FinishDetail, FinishReason, VersionSpan
from tests.e2e.chaos.reference import Reference
from tests.e2e.chaos.schedule import KINDS, request_of
from tests.e2e.chaos.suite import run_schedules
from tests.e2e.chaos.tally import Tally
from tests.e2e.chaos.verdict import judge
from tests.services import Bits, version_path
from trainer_bridge.wire import GenerateResult
from trainer_bridge.wire.result import SampledSequence

SCHEDULES = 20


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_twenty_schedules(ray_cluster: Any, tmp_path: Path, tiny_qwen3_path: Path) -> None:
    tally = Tally()
    await run_schedules(tmp_path, tiny_qwen3_path, range(SCHEDULES), tally)
    print(tally)
    assert tally.clean, tally
    assert tally.schedules == SCHEDULES and set(tally.faults) == {kind for kinds in KINDS for kind in kinds}
    # Control: most faults found work to disturb, and workers did end.
    assert sum(tally.struck.values()) * 2 > sum(tally.faults.values()), tally
    assert tally.replaced >= SCHEDULES // len(KINDS) * 3 - 1


def answer(reference: Reference, number: int, spans: tuple[VersionSpan, ...]) -> GenerateResult:
    """What a service would say to request ``number``, whose samples cross the given spans."""
    request = request_of(number)

    def sample(index: int) -> SampledSequence:
        ids: tuple[int, ...] = ()
        parts: list[Bits] = []
        for span in spans:
            parts.append(reference.stretch(request, index, ids, span.end - span.start, span.version))
            ids += parts[-1].ids
        policy, behavior = (b"".join(getattr(p, name) for p in parts) for name in ("policy", "behavior"))
        return SampledSequence(
            sample_index=index,
            token_ids=np.array(ids, np.int32),
            policy_logprobs=np.frombuffer(policy, np.float32),
            behavior_logprobs=np.frombuffer(behavior, np.float32),
            row_digests=np.frombuffer(b"".join(p.digests for p in parts), np.uint64),
            mask=np.ones(len(ids), np.uint8),
            finish=FinishDetail(FinishReason.LENGTH, limit="max_tokens"),
            spans=spans,
            text=None,
            replica="r",
            num_cached_tokens=0,
            top=None,
        )

    mode = request.sampling.logprob_mode
    samples = tuple(sample(i) for i in range(request.n))
    return GenerateResult("r", request.prompt_ids, samples, request.sampling, mode, "digest", None)


def test_the_verdict_can_fail(tiny_qwen3_path: Path) -> None:
    reference = Reference([tiny_qwen3_path, version_path(tiny_qwen3_path, 1)])
    request = request_of(1)
    length = request.sampling.max_tokens
    assert length is not None
    crossing = (VersionSpan(0, 0, 30), VersionSpan(1, 30, length))
    good = answer(reference, 1, crossing)

    def verdict(result: GenerateResult) -> Tally:
        tally = Tally()
        judge(request, result, reference, tally)
        return tally

    def with_first(**fields: Any) -> GenerateResult:
        return replace(good, samples=(replace(good.samples[0], **fields), *good.samples[1:]))

    assert verdict(good).clean and verdict(good).tokens == request.n * length and verdict(good).crossed == request.n
    policy = good.samples[0].policy_logprobs.copy()
    policy.view(np.uint32)[40] ^= 1
    assert verdict(with_first(policy_logprobs=policy)).unequal == 1, "one bit of one log-prob"
    whole = answer(reference, 1, (VersionSpan(0, 0, length),))
    assert verdict(whole).clean, "control"
    other = replace(whole, samples=tuple(replace(s, spans=(VersionSpan(1, 0, length),)) for s in whole.samples))
    assert verdict(other).mislabelled == request.n * length
    assert verdict(replace(good, samples=good.samples[:1])).lost == 1
    assert verdict(replace(good, samples=(*good.samples, good.samples[0]))).duplicated == 1
    short = {
        name: getattr(good.samples[0], name)[:-1]
        for name in ("token_ids", "policy_logprobs", "behavior_logprobs", "row_digests", "mask")
    }
    assert verdict(with_first(**short)).lost > 0
