"""Workloads: prompts, sizes."""

from __future__ import annotations

from benchmarks.workloads import STANDARD, Workload, decode_workload


def test_all_runners_of_a_turn_get_the_same_prompts_and_another_turn_others() -> None:
    work = decode_workload(4, prompt_tokens=16)
    assert work.job(500, 1) == work.job(500, 1)
    prompts, others = (work.job(500, turn)["prompts"] for turn in (1, 2))
    assert [len(p) for p in prompts] == [16] * 4
    assert all(3 <= i < 500 for p in prompts for i in p)
    # No prompt of the next turn begins like one of this turn, so no page of it can be in a prefix cache.
    assert not {tuple(p[:8]) for p in prompts} & {tuple(p[:8]) for p in others}


def test_shared_tokens_are_common_and_the_rest_is_not() -> None:
    prompts = Workload("x", 3, prompt_tokens=20, new_tokens=1, shared_tokens=10).job(5000, 1)["prompts"]
    assert len({tuple(p[:10]) for p in prompts}) == 1
    assert len({tuple(p[10:]) for p in prompts}) == 3


def test_kv_tokens_count_shared_pages_once() -> None:
    assert decode_workload(8).kv_tokens == 8 * 256
    grpo = STANDARD["grpo"]
    # 640 tokens are 5 pages; 3 of the 4 prompt pages hold no last token and are the prompt's.
    assert grpo.kv_tokens == 128 * (8 * 3 + 64 * 2)
    assert grpo.tokens == 8192
