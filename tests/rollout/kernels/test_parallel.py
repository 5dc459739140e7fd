"""Jobs are split over threads: each done once, failures told."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.kernels.cpu.parallel import run_split
from tests.engines import torch_threads


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8), st.integers(0, 2000))
def test_every_job_runs_once(costs: list[int], threads: int, worth: int) -> None:
    done: list[int] = []
    lock = threading.Lock()

    def part(first: int, last: int) -> None:
        with lock:
            done.extend(range(first, last))

    with torch_threads(threads):
        run_split(part, np.array(costs, np.int64), worth=worth)
    assert sorted(done) == list(range(len(costs)))


def shares(costs: list[int], threads: int, worth: int = 1) -> list[tuple[int, int]]:
    calls: list[tuple[int, int]] = []
    lock = threading.Lock()

    def part(first: int, last: int) -> None:
        with lock:
            calls.append((first, last))

    with torch_threads(threads):
        run_split(part, np.array(costs, np.int64), worth=worth)
    return sorted(calls)


def test_work_is_split_only_when_it_pays() -> None:
    assert len(shares([100] * 10, 2, worth=500)) == 2
    assert shares([100] * 10, 2, worth=501) == [(0, 10)]
    assert shares([100] * 10, 1) == [(0, 10)]
    assert shares([], 2) == [(0, 0)]


@pytest.mark.parametrize("jobs", [2, 4, 10])
def test_equal_jobs_are_shared_evenly(jobs: int) -> None:
    """No share is more than a job above the mean; a decoding sequence with 2 KV heads is the common case."""
    sizes = [last - first for first, last in shares([100] * jobs, 2)]
    assert max(sizes) <= -(-jobs // 2)


def test_shares_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=30)

    def part(first: int, last: int) -> None:
        meeting.wait()  # passes only when both halves run at once

    with torch_threads(2):
        run_split(part, np.full(10, 100, np.int64), worth=1)


@pytest.mark.parametrize("share", [0, 1])
def test_a_failure_in_any_share_is_raised(share: int) -> None:
    def part(first: int, last: int) -> None:
        if (first == 0) == (share == 0):
            raise ArithmeticError(f"share {share}")

    with torch_threads(2), pytest.raises(ArithmeticError, match=f"share {share}"):
        run_split(part, np.full(10, 100, np.int64), worth=1)
