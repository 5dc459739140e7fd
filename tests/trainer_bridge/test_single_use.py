"""``generate`` and ``compare`` as functions: a file of rollouts in, a verdict out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout.config import load_settings
from rollout.errors import InvalidRequest
from rollout.types import SamplingParams
from trainer_bridge.jsonl import write_rollouts
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.single_use import compare_rollouts, generate_rollouts, read_prompts


async def test_generated_rollouts_compare_equal_and_a_changed_bit_does_not(
    tiny_qwen3_path: Path, tmp_path: Path
) -> None:
    settings = load_settings(None, [f"model.path={tiny_qwen3_path}", "server.port=0", "engine.kv_cache_tokens=4096"])
    prompts = [(5, 6, 7), (9,) * 40]
    sampling = SamplingParams(seed=3, max_tokens=20, temperature=0.8, top_k=20)
    made = await generate_rollouts(prompts, sampling, n=2, digests=True, address=None, settings=settings)
    records = [record for record, _ in made]
    assert [r.seed for r in records] == [3, 3, 4, 4]
    write_rollouts(tmp_path / "r.jsonl", records)
    same = compare_rollouts(tmp_path / "r.jsonl", settings, micro_batch=3)
    assert same.bitwise_equal and same.tokens == sum(len(r.token_ids) for r in records)
    assert same.digests_equal == same.digests_total == same.tokens
    changed = records[2].policy_logprobs.copy()
    changed.view(np.int32)[1] += 1
    broken = RolloutRecord(
        **{
            f: getattr(records[2], f)
            for f in RolloutRecord.__dataclass_fields__
            if f not in ("policy_logprobs", "temperature", "behavior_logprobs", "row_digests")
        },
        policy_logprobs=changed,
    )
    write_rollouts(tmp_path / "b.jsonl", [*records[:2], broken])
    other = compare_rollouts(tmp_path / "b.jsonl", settings, micro_batch=2)
    assert other.unequal_tokens == 1 and other.first_mismatch is not None
    assert (other.first_mismatch.request_id, other.first_mismatch.position) == ("prompt1", 1)


async def test_the_priority_reaches_the_service(tiny_qwen3_path: Path) -> None:
    settings = load_settings(None, [f"model.path={tiny_qwen3_path}", "server.port=0", "server.max_priority=3"])
    sampling = SamplingParams(seed=3, max_tokens=2)
    with pytest.raises(InvalidRequest, match=r"priority = 4 is outside \[-3, 3\]"):
        await generate_rollouts(
            [(5,)], sampling, n=1, digests=False, priority=4, address=None, settings=settings
        )  # fmt: skip
    made = await generate_rollouts([(5,)], sampling, n=1, digests=False, priority=3, address=None, settings=settings)
    assert len(made) == 1


def test_prompts_name_the_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt_ids": [1, 2]}\n')
    assert read_prompts(path) == ["a", (1, 2)]
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(InvalidRequest, match="line 2"):
        read_prompts(path)
