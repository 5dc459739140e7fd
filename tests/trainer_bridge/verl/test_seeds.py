"""Seeds of a verl run, and which turn of which trajectory a request is."""

from __future__ import annotations

from dataclasses import replace

from trainer_bridge.verl.seeds import SampleTag, derive_seed, prompt_digest
from trainer_bridge.verl.trajectories import Trajectories

TAG = SampleTag(step=3, prompt=prompt_digest([5, 6]), index=2, occurrence=0, turn=0)


def test_every_part_of_the_tag_and_the_run_seed_enter() -> None:
    others = [
        replace(TAG, step=4),
        replace(TAG, prompt=prompt_digest([6, 5])),
        replace(TAG, index=3),
        replace(TAG, occurrence=1),
        replace(TAG, turn=1),
    ]
    seeds = {derive_seed(42, tag) for tag in (TAG, *others)} | {derive_seed(43, TAG)}
    assert len(seeds) == 7 and all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(42, TAG) == derive_seed(42, replace(TAG))


def test_seeds_are_fixed_for_ever() -> None:
    """Runs must repeat across releases."""
    assert derive_seed(42, TAG) == 15879916602090674


def test_turns_of_one_trajectory_count_up() -> None:
    known = Trajectories()
    first = known.tag("uuid-a", [5, 6], step=1, index=4)
    second = known.tag("uuid-a", [5, 6, 20, 21, 7], step=1, index=None)
    assert first == SampleTag(1, prompt_digest([5, 6]), 4, 0, 0)
    assert second == replace(first, turn=1)


def test_d1_siblings_differ_with_and_without_verls_index() -> None:
    known = Trajectories()
    told = [known.tag(f"u{i}", [5, 6], step=1, index=i) for i in range(4)]
    assert [tag.index for tag in told] == [0, 1, 2, 3] and {tag.occurrence for tag in told} == {0}
    untold = [known.tag(f"v{i}", [9], step=1, index=0) for i in range(4)]
    assert [tag.occurrence for tag in untold] == [0, 1, 2, 3]
    assert len({derive_seed(7, tag) for tag in told + untold}) == 8


def test_the_same_calls_get_the_same_tags_again_at_a_later_step_too() -> None:
    def run() -> list[SampleTag]:
        known = Trajectories()
        return [known.tag(f"u{step}{i}", [5], step=step, index=0) for step in (1, 2) for i in range(2)]

    assert run() == run()
    assert [tag.occurrence for tag in run()] == [0, 1, 0, 1]


def test_g1_an_aborted_turn_that_resumes_keeps_its_seed() -> None:
    known = Trajectories()
    first = known.tag("u", [5, 6], step=1, index=0)
    known.aborted("u")
    assert known.tag("u", [5, 6, 20], step=2, index=0) == first
    known.aborted("u")
    assert known.tag("u", [5, 6, 20], step=2, index=0) == first, "aborted before it sampled anything"
    assert known.tag("u", [5, 6, 20, 21, 9], step=2, index=0) == replace(first, turn=1)


def test_deterministic_ids_come_again_and_are_new_trajectories() -> None:
    known = Trajectories()
    first = known.tag("det-3", [5, 6], step=1, index=None)
    assert first.index == 3
    assert known.tag("det-3", [5, 6, 7], step=2, index=None).turn == 0, "another step"
    again = known.tag("det-3", [9], step=2, index=None)
    assert (again.turn, again.prompt) == (0, prompt_digest([9])), "another prompt"
    assert known.tag("det-3", [9], step=2, index=None).occurrence == 1, "validation of the same prompt"


def test_memory_is_bounded() -> None:
    known = Trajectories(limit=2)
    for name in ("a", "b", "c"):
        known.tag(name, [5], step=1, index=0)
    assert known.tag("c", [5, 6], step=1, index=0).turn == 1
    assert known.tag("a", [5, 6], step=1, index=0).turn == 0, "forgotten"
