"""verl's components on our service: agent loops, FSDP forward, metrics, weight sync, a killed replica, seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

from tests.verl.cluster import FLOAT32, Cluster, batch_of, start, stop, until
from tests.verl.tool import STOPS
from tests.verl.two_turns import TOOL
from trainer_bridge.batches import samples_from_dataproto
from trainer_bridge.compare import compare
from trainer_bridge.gates import StepZeroGate

pytestmark = pytest.mark.timeout(600)
PROMPTS = ("w10 w30", "w11", "w12 w13 w14 w15 w16")
N = 4
ANSWER_IDS, EOS = (40, 41, 42), 1
"""the tool's words in the example's vocabulary"""


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def cluster(request: pytest.FixtureRequest, verl_folder: Path, verl_ray: None) -> Iterator[Cluster]:
    started = start(verl_folder, FLOAT32 if request.param == "fp32" else ())
    # As verl's trainers do before the first step: the same checkpoint, so nothing is sent and nothing changes.
    started.checkpoints.update_weights(global_steps=0)
    yield started
    stop(started)


def bits(data: DataProto) -> list[tuple[bytes, bytes]]:
    return [
        (ids.numpy().tobytes(), values.numpy().tobytes())
        for ids, values in zip(data.batch["responses"], data.batch["rollout_log_probs"], strict=True)
    ]


def details(data: DataProto) -> list[dict[str, Any]]:
    return list(data.non_tensor_batch["zerodrift"])


def seeds(data: DataProto) -> set[int]:
    return {d["seed"] for d in details(data)}


def assert_zero_by_verl(data: DataProto) -> None:
    """verl's own helpers: difference 0, KL 0, every weight 1."""
    debug = calculate_debug_metrics(data)
    assert debug["training/rollout_probs_diff_valid"] == 1
    assert debug["training/rollout_probs_diff_max"] == debug["training/rollout_probs_diff_mean"] == 0.0
    config = {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "2.0",
    }
    kept = data.batch["response_mask"].clone()
    corrected, metrics = compute_rollout_correction_and_add_to_batch(data, config)
    for name in ("kl", "k3_kl", "log_ppl_abs_diff", "chi2_token", "chi2_seq", "rollout_rs_masked_fraction"):
        assert metrics[f"rollout_corr/{name}"] == 0.0, name
    assert metrics["rollout_corr/rollout_is_min"] == metrics["rollout_corr/rollout_is_max"] == 1.0
    assert torch.equal(corrected.batch["response_mask"], kept)


def test_1_verls_agent_loops_and_its_fsdp_forward_agree_to_the_bit(cluster: Cluster) -> None:
    data = cluster.score(cluster.generate(PROMPTS, N))
    mask, attention = data.batch["response_mask"], data.batch["attention_mask"]
    assert data.batch["responses"].shape == mask.shape == (len(PROMPTS) * N, 12)
    assert torch.equal(mask, attention[:, 16:]), "single turn: every real response token was sampled"
    assert data.batch["rollout_log_probs"].dtype == torch.float32
    assert bool((data.batch["rollout_log_probs"][mask.bool()] < 0).all())
    # Siblings differ, and every row tells what it came from.
    for group in range(len(PROMPTS)):
        assert len({row[0] for row in bits(data)[group * N : group * N + N]}) > 1
    assert len(seeds(data)) == len(data) and {d["seed_source"] for d in details(data)} == {"sample"}
    assert set(data.non_tensor_batch["min_global_steps"]) == {0}
    comparison = StepZeroGate().check(samples_from_dataproto(data))
    assert comparison.tokens == int(mask.sum()) > 0
    # Whole distributions, by digests that the service and verl's actor took.
    assert comparison.digests_equal == comparison.digests_total == comparison.tokens
    assert_zero_by_verl(data)


def test_2_one_bit_off_is_seen_by_the_gate(cluster: Cluster) -> None:
    data = cluster.score(cluster.generate(PROMPTS, N))
    first = data.batch["rollout_log_probs"][0, 0]
    data.batch["rollout_log_probs"][0, 0] = torch.nextafter(first, torch.tensor(0.0))
    assert compare(samples_from_dataproto(data)).unequal_tokens == 1


def test_3_a_second_run_repeats_and_another_step_does_not(cluster: Cluster) -> None:
    """A run is a router, workers, clients and request ids of its own; the step alone is told, the weights stay."""
    run = cluster.fresh_loops()
    first = cluster.generate(PROMPTS, N, loops=run)
    assert bits(cluster.generate(PROMPTS, N, loops=cluster.fresh_loops())) == bits(first)
    twice = cluster.generate(PROMPTS, N, loops=run)
    assert bits(twice) != bits(first), "a prompt that comes again within a step is another sample"
    assert not seeds(twice) & seeds(first)
    cluster.checkpoints.update_weights(global_steps=9)
    later = cluster.generate(PROMPTS, N, loops=run)
    assert set(later.non_tensor_batch["global_steps"]) == {9}
    assert bits(later) != bits(first) and not seeds(later) & seeds(first)
    cluster.checkpoints.update_weights(global_steps=0)


def test_3b_two_turns_with_a_tool_between(cluster: Cluster) -> None:
    data = cluster.score(cluster.generate(PROMPTS, N, agent="two_turns"))
    mask, responses = data.batch["response_mask"], data.batch["responses"]
    assert mask.tolist() == [[1] * 5 + [0] * 3 + [1] * 4] * len(data)
    assert responses[:, 5:8].tolist() == [list(TOOL)] * len(data)
    first, second = details(data), list(data.non_tensor_batch["second"])
    assert {d["turn"] for d in first} == {0} and {d["turn"] for d in second} == {1}
    assert len({d["seed"] for d in [*first, *second]}) == 2 * len(data)
    assert [d["prompt_tokens"] + 8 for d in first] == [d["prompt_tokens"] for d in second], (
        "a turn is a prefix of the next"
    )
    assert compare(samples_from_dataproto(data)).tokens == 9 * len(data)
    assert_zero_by_verl(data)
    data.batch["rollout_log_probs"][mask == 0] = float("nan")
    assert compare(samples_from_dataproto(data)).bitwise_equal


def test_3c_verls_own_tool_loop(cluster: Cluster) -> None:
    """Its state machine, its tool registry, its continuous tokens; tool tokens have mask 0 and turns join by ids."""
    data = cluster.score(cluster.generate(PROMPTS, N, agent="tool_agent"))
    mask, responses = data.batch["response_mask"], data.batch["responses"]
    real = data.batch["attention_mask"][:, 16:].bool()
    told = ((mask == 0) & real).sum(dim=1)
    assert bool((told > 0).any()), "no row had room for the tool's answer"
    for row in range(len(data)):
        first = int((mask[row] == 0).float().argmax()) if told[row] else int(real[row].sum())
        assert mask[row, :first].all() and first > 0
        if told[row]:
            assert set(ANSWER_IDS) <= set(responses[row][(mask[row] == 0) & real[row]].tolist())
            assert int(responses[row, first - 1]) in STOPS or int(responses[row, first - 1]) == EOS
    assert compare(samples_from_dataproto(data)).tokens == int(mask.sum())
    assert_zero_by_verl(data)
    # A rerun gives every row its own sample again, though this loop tells the balancer no place in the batch.
    run = cluster.fresh_loops()
    again = cluster.generate(PROMPTS, N, agent="tool_agent", loops=run)
    other = cluster.generate(PROMPTS, N, agent="tool_agent", loops=cluster.fresh_loops())
    assert bits(again) == bits(other) and details(again)[0]["seed_source"] == "sample"
    assert [d["seed"] for d in details(again)] == [d["seed"] for d in details(other)]


def test_3d_verls_asynchronous_client_resumes_aborted_turns_to_the_same_tokens(cluster: Cluster) -> None:
    """Aborts whenever they come: what it puts together is what an undisturbed call gives, within the same budget."""
    prompt, wanted = [10, 11, 12], {"temperature": 0.7, "logprobs": True, "ignore_eos": True, "max_tokens": 12}

    async def call(disturb: bool) -> tuple[list[int], list[float]]:
        client = cluster.servers.get_client(client_cls=FullyAsyncLLMServerClient)
        task = asyncio.create_task(client.generate("trajectory", prompt_ids=prompt, sampling_params=wanted))
        handles = cluster.servers.server_handles
        for refuse in (False, True, False) if disturb else ():
            await asyncio.gather(*(handle.abort_all_requests.remote(reject_request=refuse) for handle in handles))
            await asyncio.gather(*(handle.resume_generation.remote() for handle in handles))
        output = await task
        return output.token_ids, output.log_probs

    cluster.fresh_loops()
    whole = asyncio.run(call(disturb=False))
    cluster.fresh_loops()
    assert asyncio.run(call(disturb=True)) == whole
    assert len(whole[0]) == len(whole[1]) == 12


def test_4_weights_through_verls_checkpoint_manager(cluster: Cluster) -> None:
    before = cluster.score(cluster.generate(PROMPTS, N))
    metrics = cluster.learn(before)
    assert np.isfinite(np.mean(metrics["grad_norm"])) and np.mean(metrics["grad_norm"]) > 0
    assert cluster.checkpoints.update_weights(global_steps=1)["zerodrift/services_updated"] == 3
    after = cluster.score(cluster.generate(PROMPTS, N))
    assert set(after.non_tensor_batch["min_global_steps"]) == set(after.non_tensor_batch["max_global_steps"]) == {1}
    assert bits(before) != bits(after)
    assert compare(samples_from_dataproto(after)).bitwise_equal
    assert_zero_by_verl(after)
    # One bit off in a row of the weights that the actor holds: its canary stops the step.
    first = after.batch["rollout_log_probs"][0, 0].clone()
    after.batch["rollout_log_probs"][0, 0] = torch.nextafter(first, torch.tensor(0.0))
    with pytest.raises(Exception, match="canary: UNEQUAL: 1 of"):
        cluster.score(after)
    after.batch["rollout_log_probs"][0, 0] = first
    cluster.score(after)
    # Control: the old rollout under the new weights, which the canary does not judge.
    stale = cluster.score(before)
    assert not compare(samples_from_dataproto(stale)).bitwise_equal
    assert calculate_debug_metrics(stale)["training/rollout_probs_diff_max"] > 0


def inflight(cluster: Cluster) -> dict[str, int]:
    return dict(ray.get(cluster.servers.global_load_balancer.get_status.remote())["servers"])


def run_with_a_death(cluster: Cluster, victim: int, kill: Callable[[Any], None]) -> int:
    """Agent loops during which a server dies with requests inside; returns how many it held."""
    handle = cluster.servers.server_handles[victim]
    # It takes requests in and holds them, so that the death comes in the middle whatever the machine's speed.
    ray.get(handle.abort_all_requests.remote())
    (worker,) = cluster.fresh_loops().agent_loop_workers
    data = batch_of(PROMPTS, N)
    data.non_tensor_batch["priority"] = np.arange(len(data), dtype=np.int64)
    pending = worker.generate_sequences.remote(data)
    until(lambda: (loads := sorted(inflight(cluster).values()))[-1] > 0 and not any(loads[:-1]))
    held = max(inflight(cluster).values())
    kill(handle)
    returned = bits(ray.get(pending))
    status = ray.get(cluster.servers.global_load_balancer.get_status.remote())
    assert status["calls_made_again"] >= held > 0 and len(status["dead"]) == 1
    # The same bits as a run without the death: another router, the servers that live.
    whole = bits(cluster.generate(PROMPTS, N, loops=cluster.fresh_loops()))
    assert returned == whole and len(returned) == len(data)
    return held


def test_5_a_killed_server_costs_no_sample_and_no_bit(cluster: Cluster) -> None:
    reference = bits(cluster.generate(PROMPTS, N, loops=cluster.fresh_loops()))
    # The first of equally loaded ones, so it is sure to be asked.
    assert run_with_a_death(cluster, 0, ray.kill) > 0
    loops = cluster.fresh_loops()
    assert bits(cluster.generate(PROMPTS, N, loops=loops)) == reference
    # Later requests find the living ones, and weights go on.
    cluster.learn(cluster.score(cluster.generate(PROMPTS, N, loops=loops)), seed=1)
    assert cluster.checkpoints.update_weights(global_steps=2)["zerodrift/services_updated"] == 2
    assert compare(samples_from_dataproto(cluster.score(cluster.generate(PROMPTS, N, loops=loops)))).bitwise_equal


def test_6_a_service_that_dies_behind_a_living_actor(cluster: Cluster) -> None:
    """Its actor answers, its service does not: it leaves rotation, and misses weights without ending the sync."""
    loops = cluster.fresh_loops()
    before = bits(cluster.generate(PROMPTS, N, loops=loops))
    ray.get(cluster.servers.server_handles[1].shutdown.remote())
    loops = cluster.fresh_loops()
    assert bits(cluster.generate(PROMPTS, N, loops=loops)) == before
    cluster.learn(cluster.score(cluster.generate(PROMPTS, N, loops=loops)), seed=2)
    assert cluster.checkpoints.update_weights(global_steps=3)["zerodrift/services_updated"] == 1
    # A run of its own, which knows nothing of the death, is told so when it asks.
    loops = cluster.fresh_loops()
    after = cluster.score(cluster.generate(PROMPTS, N, loops=loops))
    assert set(after.non_tensor_batch["min_global_steps"]) == {3}
    assert compare(samples_from_dataproto(after)).bitwise_equal
    assert len(ray.get(cluster.servers.global_load_balancer.get_status.remote())["dead"]) == 2
