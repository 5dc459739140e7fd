"""Properties 2, 3, 4, 5, 6 and 7 at once: 500 random lives of an engine, every bit as in the isolated run (D, E, G).

``tests/jitter.py`` says what a life holds; ``make soak`` plays others for as long as one likes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engine import Engine
from rollout.kernels.base import Decoder
from rollout.kernels.cpu.kernel_set import CpuKernelSet
from rollout.kvcache import PageAllocator
from rollout.model import load_model
from rollout.prefix_cache import PrefixIndex
from rollout.scheduler import Scheduler
from rollout.sequence import Sequence
from tests import jitter
from tests.engines import torch_threads
from tests.jitter import Arrival, Plan, Rig, Tally, faults, random_plan, shrink

SCHEDULES, PARTS = 500, 10


@pytest.fixture(scope="module")
def rig(tiny_qwen3_path: Path) -> Iterator[Rig]:
    with torch_threads(1):
        yield Rig(tiny_qwen3_path)


@pytest.fixture(scope="module")
def rigs(rig: Rig, tiny_llama_path: Path) -> tuple[Rig, Rig]:
    """Both architectures, both dtypes."""
    with torch_threads(1):
        return rig, Rig(tiny_llama_path, torch.bfloat16)


@pytest.fixture(scope="module")
def total() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    print(f"jitter: {tally}")


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(rigs: tuple[Rig, Rig], total: Tally, part: int) -> None:
    size = SCHEDULES // PARTS
    tally = Tally()
    jitter.check(rigs[part % 2], range(part * size, (part + 1) * size), tally)
    # Not vacuous: each part meets everything that may happen.
    assert tally.schedules == size and tally.differences == 0
    assert min(tally.tokens // 10, tally.scored, tally.cached, tally.copied, tally.preemptions) > 100, str(tally)
    assert min(tally.aborts, tally.resumes, tally.updates) > 5, str(tally)
    for name, value in vars(tally).items():
        setattr(total, name, getattr(total, name) + value)


def test_a_plan_is_that_of_its_seed() -> None:
    assert random_plan(7) == random_plan(7) != random_plan(8)


# ---- negative controls ------------------------------------------------------------------------------------------


def caught(rig: Rig, most: int = 60) -> list[str]:
    """The faults of the first plan that shows any."""
    for seed in range(most):
        wrong = faults(rig, random_plan(seed))
        if wrong:
            return wrong
    return []


class OverreadingKernels(CpuKernelSet):
    """Attends to one slot more than the sequence has."""

    def decoder(self, hf: Any, context_length: int) -> Decoder | None:
        return None

    def attention_with_kvcache(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        room = kwargs["page_table"].size(1) * self.page_size
        kwargs["cache_seqlens"] = (kwargs["cache_seqlens"] + 1).clamp(max=room)
        return super().attention_with_kvcache(*args, **kwargs)


def test_a_kernel_that_reads_one_slot_too_many_is_caught(tiny_qwen3_path: Path) -> None:
    bad = load_model(tiny_qwen3_path, dtype=torch.float32, kernels=OverreadingKernels(16))
    wrong = caught(Rig(tiny_qwen3_path, model=bad))
    assert any("NaN" in what for what in wrong), wrong


def test_a_page_shared_while_it_is_open_is_caught_by_its_bits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences write one page, as in E3, and no check of the books is there to see it."""
    real = PageAllocator.take
    handed: list[int] = []

    def take(self: PageAllocator) -> int:
        page = real(self)
        handed.append(page)
        return handed[-2] if len(handed) == 2 else page

    monkeypatch.setattr(PageAllocator, "take", take)
    monkeypatch.setattr(PageAllocator, "release", lambda self, pages: None)
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    arrivals = tuple(Arrival(0, i, 0, "") for i in (4, 8))
    plan = dataclasses.replace(
        random_plan(0), arrivals=arrivals, scores=(), aborts=(), preempts=(), updates=(), shuffles=(), storm=False,
        poison=False, prefix_cache=False, pages=14, chunk=60, batch_tokens=70, running=8,
    )  # fmt: skip
    life = jitter.Life(rig, plan, Tally())
    with rig.model.kernels.invariant_mode():
        while life.engine.live_ids or life._due:
            while life._due:
                life._due.pop(0)[1]()
            life.take(life.engine.step())
    life._finish()
    assert any("differ" in what for what in life.differences)


def test_a_leak_is_caught_by_the_books(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PageAllocator.release
    monkeypatch.setattr(PageAllocator, "release", lambda self, pages: real(self, pages[1:]))
    assert caught(rig)[0].startswith("AssertionError: tables hold")


@pytest.mark.parametrize("fault", ["version", "prompt", "seed", "order"])
def test_a_fault_in_the_engine_is_caught(rig: Rig, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "version":
        # KV of the old weights serves the new ones.
        monkeypatch.setattr(PrefixIndex, "restart", lambda self, version: setattr(self, "version", version))
        monkeypatch.setattr(PageAllocator, "_uncache", lambda self, pages: None)
        monkeypatch.setattr(Scheduler, "restart_kv", lambda self, version: None)
        monkeypatch.setattr(Scheduler, "check", lambda self: None)
    elif fault == "prompt":
        # Cached rows are skipped although their log-probs are wanted (B1).
        skipping = property(lambda self: len(self.token_ids) - 1 - (self.score is not None))
        monkeypatch.setattr(Sequence, "num_reusable", skipping)
    elif fault == "seed":
        # The random stream restarts at a preemption (D6).
        real = Scheduler.preempt

        def preempt(self: Scheduler, sequence: Sequence) -> None:
            real(self, sequence)
            sequence.seed += 1

        monkeypatch.setattr(Scheduler, "preempt", preempt)
    else:
        # A priority that leaks into what is sampled.
        add = Engine.add

        def with_priority(self: Engine, request: Any) -> None:
            add(self, request)
            self._live[request.sample_id].seed += request.priority

        monkeypatch.setattr(Engine, "add", with_priority)
    assert caught(rig)


def test_a_failing_plan_is_cut_down_and_can_be_played_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler.preempt

    def preempt(self: Scheduler, sequence: Sequence) -> None:
        real(self, sequence)
        sequence.seed += 1

    monkeypatch.setattr(Scheduler, "preempt", preempt)
    seed = next(s for s in range(60) if faults(rig, random_plan(s)))
    with pytest.raises(AssertionError, match=rf"(?s)schedule {seed}: .*--seed {seed} ") as told:
        jitter.check(rig, range(seed + 1), Tally())
    assert "least that fails: Plan(" in str(told.value)
    small = shrink(random_plan(seed), lambda plan: bool(faults(rig, plan)))
    assert len(small.arrivals) <= 2 and not small.scores and not small.updates
    again = eval(repr(small), {"Plan": Plan, "Arrival": Arrival})
    assert again == small and faults(rig, again)
