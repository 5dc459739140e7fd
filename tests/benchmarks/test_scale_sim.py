"""The simulation keeps its own promises: nothing is lost, seeds decide, and the known answers come out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.scale_cluster import OURS, POLICIES, Cluster, Parameters
from benchmarks.scale_sim import broadcast_s, servers_needed

ROOT = Path(__file__).parents[2]
SMALL = Parameters(prompts_per_replica=4, group=4, length_median=100.0, length_limit=400, restart_s=1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_sample_is_answered_once_whoever_dies(policy: str) -> None:
    deadly = dataclasses.replace(SMALL, deaths_per_npu_hour=400.0)
    cluster = Cluster(8, policy, deadly, seed=1)  # type: ignore[arg-type]
    outcome = cluster.run()
    calm = Cluster(8, policy, deadly, seed=1, deaths=False).run()  # type: ignore[arg-type]
    assert outcome.deaths > 0 and calm.deaths == 0
    assert outcome.tokens == calm.tokens and cluster.left == 0
    assert outcome.replayed > 0 and calm.replayed == 0


def test_the_seed_decides() -> None:
    first, again, other = (Cluster(8, OURS, SMALL, seed=s).run() for s in (1, 1, 2))
    assert first == again and first != other


def test_one_replica_with_one_sample_takes_what_its_tokens_take() -> None:
    one = dataclasses.replace(SMALL, prompts_per_replica=1, group=1, slow_share=0.0)
    outcome = Cluster(1, OURS, one, seed=0, deaths=False).run()
    expected = one.prompt_tokens * one.prefill_s_per_token + outcome.tokens * one.step_base_s
    assert outcome.makespan_s == pytest.approx(expected)
    slow = dataclasses.replace(one, slow_share=1.0, slow_factor=3.0)
    slower = Cluster(1, OURS, slow, seed=0, deaths=False).run()
    assert slower.makespan_s > 2.5 * outcome.makespan_s, "control: stragglers are simulated"


def test_whole_groups_find_their_prompt_and_scattered_ones_do_not() -> None:
    hits = {policy: Cluster(16, policy, SMALL, seed=0).run().hits for policy in POLICIES}
    assert hits[OURS] == pytest.approx(3 / 4), "all but the first of four"
    assert hits["round robin"] < 0.1


def test_a_star_grows_with_the_cluster_and_a_tree_with_its_depth() -> None:
    star = [broadcast_s(n, SMALL, "star") for n in (8, 64)]
    tree = [broadcast_s(n, SMALL, "tree") for n in (8, 64, 4096)]
    assert star[1] == 8 * star[0]
    assert tree[0] < tree[1] < tree[2] < 2 * tree[0]


def test_servers_follow_messages() -> None:
    assert servers_needed(0.0, SMALL, 1) == 1
    assert servers_needed(SMALL.relay_chunks_s * 10, SMALL, 1) == 10
    assert servers_needed(SMALL.relay_chunks_s * 10, SMALL, 16) == 1


def test_the_page_shows_what_the_simulation_says() -> None:
    result = json.loads((ROOT / "benchmarks/scale.json").read_text())
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    assert Parameters(**result["parameters"]) == Parameters(), "make scale, then the page"
    for r in result["steps"]:
        rate = r["tokens_s"] / r["npus"]
        figures = f"{r['makespan_s']:.0f} | {r['most_s']:.0f} | {rate:.0f} | {r['busy']:.0%} | {r['hits']:.0%} |"
        assert f"| {r['npus']:,} | {r['policy']} | {figures}" in page
    for r in result["spread"]:
        servers = " | ".join(str(n) for n in r["servers"].values())
        assert f"| {r['npus']:,} | {r['star_s']:.1f} | {r['tree_s']:.1f} | {servers} |" in page
    small = next(r for r in result["steps"] if r["npus"] == 8 and r["policy"] == OURS)
    again = dataclasses.asdict(Cluster(8, OURS, Parameters(), result["seed"]).run())
    assert {name: small[name] for name in again} == again, "the committed figures are those of this code"
