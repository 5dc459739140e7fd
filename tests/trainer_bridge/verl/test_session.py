"""A session over a real service: bits, seeds, aborts, budgets, versions; without Ray and verl."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.types import UpdatePolicy
from tests.services import PROMPT, StepGate, engine_threads, soon, tensors_of, tiny_service, version_path
from trainer_bridge.forward import TrainingForward, TrainingSample
from trainer_bridge.verl.options import VerlOptions
from trainer_bridge.verl.sampling import LengthBudget
from trainer_bridge.verl.seeds import SampleTag, derive_seed, prompt_digest
from trainer_bridge.verl.session import Session, TurnOutput
from trainer_bridge.verl.sync import push_weights

VERL = {"temperature": 0.7, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "ignore_eos": True}


def tag(index: int = 0, **changes: Any) -> SampleTag:
    fields: dict[str, Any] = {"step": 0, "prompt": prompt_digest(PROMPT), "index": index, "occurrence": 0, "turn": 0}
    return SampleTag(**(fields | changes))


@asynccontextmanager
async def session(path: Path, *, response: int = 12, **engine: Any) -> AsyncIterator[tuple[Any, Any, Session]]:
    async with tiny_service(path, **engine) as (service, client):
        budget = LengthBudget(prompt_length=16, response_length=response, context_length=512)
        yield service, client, Session(client, await client.info(), VerlOptions(timeout_s=60), budget, run_seed=42)


async def generate(
    one: Session, index: int = 0, request: str = "r", prompt: tuple[int, ...] = PROMPT, **given: Any
) -> TurnOutput:
    return await one.generate(prompt, VERL | given, request, tag(index))


def content(output: TurnOutput) -> tuple[list[int], list[float] | None]:
    return output.token_ids, output.log_probs


async def test_tokens_log_probs_and_what_is_told_about_them(tiny_qwen3_path: Path) -> None:
    async with session(tiny_qwen3_path) as (_, client, one):
        output = await generate(one)
        info = await client.info()
    details = output.fields["zerodrift"]
    assert output.log_probs is not None and len(output.token_ids) == len(output.log_probs) == 12
    assert output.stop_reason == "completed" and details["limit"] == "max_tokens"
    assert details["seed"] == derive_seed(42, tag()) and details["seed_source"] == "sample"
    assert details["spans"] == [(0, 0, 12)] and details["manifest_digest"] == info.manifest_digest
    assert output.fields["global_steps"] == output.fields["min_global_steps"] == 0
    # Python floats carry float32 exactly, so verl's float32 tensor holds the rollout's bits.
    assert np.array(output.log_probs, np.float32).astype(float).tolist() == output.log_probs


async def test_d1_equal_tags_repeat_and_siblings_differ_whatever_the_request_id(tiny_qwen3_path: Path) -> None:
    async with session(tiny_qwen3_path) as (_, _, one):
        first = [content(await generate(one, i)) for i in range(3)]
        again = [content(await generate(one, i, request=f"other-{i}")) for i in (2, 1, 0)]
    assert first == again[::-1]
    assert len({tuple(ids) for ids, _ in first}) == 3


async def test_without_a_tag_siblings_differ_and_the_source_is_told(tiny_qwen3_path: Path) -> None:
    async with session(tiny_qwen3_path) as (_, _, one):
        a = await one.generate(PROMPT, VERL, "uuid-a", None)
        b = await one.generate(PROMPT, VERL, "uuid-b", None)
        given = await one.generate(PROMPT, VERL | {"seed": 9}, "uuid-c", None)
    assert a.fields["zerodrift"]["seed_source"] == "request_id" and a.token_ids != b.token_ids
    assert (given.fields["zerodrift"]["seed"], given.fields["zerodrift"]["seed_source"]) == (9, "request")


async def test_a2_filters_leave_the_policys_log_prob_and_show_in_the_behaviour(tiny_qwen3_path: Path) -> None:
    async with session(tiny_qwen3_path) as (_, _, one):
        output = await generate(one, top_k=3)
    details = output.fields["zerodrift"]
    assert details["filtered"] and details["behavior_logprobs"] != output.log_probs
    assert all(b >= p for b, p in zip(details["behavior_logprobs"], output.log_probs or [], strict=True))


async def test_g1_abort_at_every_point_resumes_to_the_same_tokens_within_the_budget(tiny_qwen3_path: Path) -> None:
    async with session(tiny_qwen3_path, response=10) as (service, _, one):
        whole = content(await generate(one))
        for steps in range(1, 8):
            gate = StepGate(engine_threads(service)[0], steps)
            async with gate:
                task = asyncio.create_task(generate(one))
                await gate.reached()
                aborting = asyncio.create_task(one.abort_all(refuse=False))
                await asyncio.sleep(0)
                gate.open()
                await soon(aborting)
                part = await soon(task)
            parked = asyncio.create_task(
                one.generate([*PROMPT, *part.token_ids], VERL | {"max_tokens": 10 - len(part.token_ids)}, "r", tag())
            )
            await asyncio.sleep(0)
            assert part.stop_reason == "aborted" or len(part.token_ids) == 10
            await one.resume()
            if len(part.token_ids) == 10:
                parked.cancel()
                await asyncio.gather(parked, return_exceptions=True)
                continue
            rest = await soon(parked)
            assert [*part.token_ids, *rest.token_ids] == whole[0]
            assert [*(part.log_probs or []), *(rest.log_probs or [])] == whole[1]


async def test_a_refusing_session_answers_with_no_token(tiny_qwen3_path: Path) -> None:
    async with session(tiny_qwen3_path) as (_, _, one):
        assert await one.abort_all(refuse=True) == 0
        refused = await generate(one)
        assert (refused.token_ids, refused.log_probs, refused.stop_reason) == ([], [], "aborted")
        await one.resume()
        assert len((await generate(one)).token_ids) == 12


async def test_sleep_and_abort_are_undone_each_by_its_own(tiny_qwen3_path: Path) -> None:
    """verl's asynchronous trainers abort, sleep, sync weights (which wakes), and only then resume."""
    async with session(tiny_qwen3_path) as (_, _, one):
        await one.abort_all(refuse=True)
        await one.sleep()
        assert (await generate(one)).stop_reason == "aborted", "a server that left rotation parks nobody"
        await one.wake_up()
        assert (await generate(one)).stop_reason == "aborted"
        await one.sleep()
        await one.resume()
        waiting = asyncio.create_task(generate(one))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        await one.wake_up()
        assert len((await soon(waiting)).token_ids) == 12


async def test_g3_versions_are_told_as_global_steps(tiny_qwen3_path: Path) -> None:
    async with session(tiny_qwen3_path) as (_, client, one):
        before = await generate(one)
        tensors = tensors_of(version_path(tiny_qwen3_path, 1))
        state = await push_weights(client, tensors, step=7, policy=UpdatePolicy.WAIT, info=await client.info())
        one.set_step(7, state.version)
        after = await generate(one)
        same = await push_weights(client, tensors, step=8, policy=UpdatePolicy.WAIT, info=await client.info())
    assert state.version == 7 and after.fields["global_steps"] == 7 == after.fields["min_global_steps"]
    assert before.token_ids != after.token_ids and before.fields["global_steps"] == 0
    assert same == state, "equal bytes are not sent again"


async def test_one_rounding_of_masters_is_the_trainers_rounding(tiny_qwen3_path: Path) -> None:
    """float32 masters with bits below the served dtype's: what is served is their cast, and re-scores to the bit."""
    async with session(tiny_qwen3_path) as (service, client, one):
        masters = [(name, t.double() * (1 + 1e-9)) for name, t in tensors_of(version_path(tiny_qwen3_path, 1))]
        await push_weights(client, masters, step=1, policy=UpdatePolicy.WAIT, info=await client.info())
        output = await generate(one)
        model = engine_threads(service)[0].engine.model
        for name, parameter in model.parameters():
            assert torch.equal(parameter, dict(masters)[name].to(torch.float32)), name
        forward = TrainingForward(model)
        with torch.no_grad(), forward.aligned():
            out = forward([TrainingSample(np.array(PROMPT, np.int32), np.array(output.token_ids, np.int32), 0.7)])
    assert out.logprobs.tolist() == output.log_probs
