"""verl's components on our service: agent loops, FSDP forward, metrics, weight sync, a killed replica, seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.debug.metrics import calculate_debug_metrics

from tests.verl.cluster import FLOAT32, Cluster, batch_of, start, stop
from tests.verl.two_turns import TOOL
from trainer_bridge.batches import samples_from_dataproto
from trainer_bridge.compare import compare
from trainer_bridge.gates import StepZeroGate

pytestmark = pytest.mark.timeout(600)
PROMPTS = ("w10 w30", "w11", "w12 w13 w14 w15 w16")
N = 3


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
    assert_zero_by_verl(data)


def test_2_one_bit_off_is_seen_by_the_gate(cluster: Cluster) -> None:
    data = cluster.score(cluster.generate(PROMPTS[:1], N))
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


def test_4_weights_through_verls_checkpoint_manager(cluster: Cluster) -> None:
    before = cluster.score(cluster.generate(PROMPTS, N))
    metrics = cluster.learn(before)
    assert np.isfinite(np.mean(metrics["grad_norm"])) and np.mean(metrics["grad_norm"]) > 0
    assert cluster.checkpoints.update_weights(global_steps=1)["zerodrift/services_updated"] == 2
    after = cluster.score(cluster.generate(PROMPTS, N))
    assert set(after.non_tensor_batch["min_global_steps"]) == set(after.non_tensor_batch["max_global_steps"]) == {1}
    assert bits(before) != bits(after)
    assert compare(samples_from_dataproto(after)).bitwise_equal
    assert_zero_by_verl(after)
    # Control: the old rollout under the new weights.
    stale = cluster.score(before)
    assert not compare(samples_from_dataproto(stale)).bitwise_equal
    assert calculate_debug_metrics(stale)["training/rollout_probs_diff_max"] > 0


def test_5_a_killed_replica_costs_no_sample_and_no_bit(cluster: Cluster) -> None:
    whole = cluster.generate(PROMPTS, N, loops=cluster.fresh_loops())
    loops = cluster.fresh_loops()
    (worker,) = loops.agent_loop_workers
    data = batch_of(PROMPTS, N)
    data.non_tensor_batch["priority"] = np.arange(len(data), dtype=np.int64)
    pending = worker.generate_sequences.remote(data)
    ray.kill(cluster.servers.server_handles[1])
    assert bits(ray.get(pending)) == bits(whole)
    # Later requests find the living one, and weights go on.
    scored = cluster.score(cluster.generate(PROMPTS, N, loops=loops))
    status = ray.get(cluster.servers.global_load_balancer.get_status.remote())
    assert len(status["dead"]) == 1 and status["active_servers"] == 1
    cluster.learn(scored, seed=1)
    assert cluster.checkpoints.update_weights(global_steps=2)["zerodrift/services_updated"] == 1
    assert compare(samples_from_dataproto(cluster.score(cluster.generate(PROMPTS, N, loops=loops)))).bitwise_equal
