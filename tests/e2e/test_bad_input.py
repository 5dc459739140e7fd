"""Bad input to a whole service: a typed error that names the field, and the same bits for everybody else afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollout.errors import InvalidRequest, RolloutError, UnsupportedFeature
from rollout.types import SamplingParams, ScoreSequence
from tests.services import PROMPT, assert_idle, bits, check_pages, engine_threads, sampling, soon, tiny_service
from trainer_bridge.aio_client import AsyncRolloutClient

Call = Callable[[AsyncRolloutClient], Awaitable[object]]
NAN = float("nan")


def generate(prompt: object = PROMPT, n: int = 1, **fields: object) -> Call:
    return lambda client: client.generate(prompt, SamplingParams(**fields), n=n)  # type: ignore[arg-type]


def score(*ids: tuple[int, ...], start: int = 1, temperature: float = 1.0) -> Call:
    return lambda client: client.score([ScoreSequence(i, start) for i in ids], temperature=temperature)


BAD: list[tuple[str, Call, type[RolloutError], str, str]] = [
    ("an empty prompt", generate(()), InvalidRequest, "prompt", ""),
    ("a negative id", generate((3, -1)), InvalidRequest, "prompt", "-1"),
    ("an id beyond the vocabulary", generate((3, 64)), InvalidRequest, "prompt", "64"),
    ("an id beyond int32", generate((3, 2**31)), InvalidRequest, "prompt", "2147483648"),
    ("a prompt as long as the context", generate((3,) * 512), InvalidRequest, "prompt", "512"),
    ("a prompt far over the context", generate((3,) * 5000), InvalidRequest, "prompt", "5000"),
    ("text without a tokenizer", generate("some text"), UnsupportedFeature, "text", "token ids"),
    ("no samples", generate(n=0), InvalidRequest, "n", "0"),
    ("too many samples", generate(n=17), InvalidRequest, "n", "16"),
    ("a NaN temperature", generate(temperature=NAN), InvalidRequest, "sampling.temperature", "nan"),
    ("a negative temperature", generate(temperature=-0.5), InvalidRequest, "sampling.temperature", "-0.5"),
    ("top_p of nothing", generate(top_p=0.0), InvalidRequest, "sampling.top_p", "0"),
    ("a NaN min_p", generate(min_p=NAN), InvalidRequest, "sampling.min_p", "nan"),
    ("no tokens", generate(max_tokens=0), InvalidRequest, "sampling.max_tokens", "0"),
    ("more tokens than the cache", generate(max_tokens=400), InvalidRequest, "sampling.max_tokens", "kv_cache_tokens"),
    ("no limit, and a cache below the context", generate(), InvalidRequest, "sampling.max_tokens", "kv_cache_tokens"),
    ("stop strings without a tokenizer", generate(stop=("x",)), InvalidRequest, "sampling.stop", "tokenizer"),
    ("undefined tokens without a tokenizer", generate(bar_undefined_tokens=True), InvalidRequest,
     "sampling.bar_undefined_tokens", "tokenizer"),
    ("a stop id too large", generate(stop_token_ids=(64,)), InvalidRequest, "sampling.stop_token_ids", "64"),
    ("every id barred", generate(barred_token_ids=tuple(range(64))), InvalidRequest, "sampling.barred_token_ids", ""),
    ("a score of nothing", score(), InvalidRequest, "sequences", ""),
    ("a score of one id", score((3,)), InvalidRequest, "sequences[0]", ""),
    ("a scored id beyond the vocabulary", score((3, 4), (3, 64)), InvalidRequest, "sequences", "64"),
    ("a scored sequence over the context", score((3,) * 513), InvalidRequest, "sequences", "513"),
    ("a scored sequence over the cache", score((3,) * 300), InvalidRequest, "sequences", "kv_cache_tokens"),
    ("a start beyond the sequence", score((3, 4), start=2), InvalidRequest, "sequences[0].start", "2"),
    ("a NaN temperature to score", score((3, 4), temperature=NAN), InvalidRequest, "temperature", "nan"),
]  # fmt: skip


async def good(client: AsyncRolloutClient, seed: int = 7) -> list[object]:
    result = await soon(client.generate(PROMPT, sampling(seed=seed, max_tokens=8), n=2, row_digests=True))
    scored = await soon(client.score([ScoreSequence(PROMPT * 5)]))
    return [*bits(result), scored.scores[0].logprobs.tobytes()]


async def test_each_is_refused_by_name_and_the_next_call_is_bit_equal(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, replicas=2, kv_cache_tokens=256) as (service, client):
        before = await good(client)
        wrong: list[str] = []
        for name, call, kind, field, text in BAD:
            try:
                await soon(call(client))
                wrong.append(f"{name}: served")
            except RolloutError as error:
                # The field may go on with the place inside it, such as prompt.tokens.ids[1].
                if type(error) is not kind or not error.field.startswith(field) or text not in error.message:
                    wrong.append(f"{name}: {type(error).__name__} {error.field!r} {error.message}")
            assert await good(client) == before, f"after {name}"
        assert wrong == []
        assert await good(client, seed=8) != before, "control: another seed"
        assert all(thread.broken is None for thread in engine_threads(service))
        check_pages(service)
        await assert_idle(client)


async def test_the_same_calls_without_the_fault_are_served(tiny_qwen3_path: Path) -> None:
    """Control: it is the fault that is refused."""
    fine = [
        generate((3, 63), max_tokens=1),
        generate((3,) * 255, max_tokens=1),
        generate(n=16, max_tokens=1),
        generate(max_tokens=253),
        generate(max_tokens=2, top_p=1e-9, temperature=1e-5),
        generate(max_tokens=2, barred_token_ids=tuple(range(63))),
        generate(max_tokens=2, stop_token_ids=(63,)),
        score((3, 63), (3,) * 256),
    ]
    async with tiny_service(tiny_qwen3_path, kv_cache_tokens=256) as (_, client):
        for call in fine:
            await soon(call(client))


async def test_the_lowest_temperature_that_the_message_allows(tiny_qwen3_path: Path) -> None:
    """And its echo, which is the float32 beside it, may be sent again (D2)."""
    async with tiny_service(tiny_qwen3_path) as (_, client):
        with pytest.raises(InvalidRequest, match=r"\[1e-6, "):
            await client.generate(PROMPT, sampling(temperature=0.9e-6))
        first = await client.generate(PROMPT, sampling(temperature=1e-6))
        again = await client.generate(PROMPT, first.sampling)
    assert bits(again) == bits(first)
