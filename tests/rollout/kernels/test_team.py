"""Calls on torch's threads: every job once, the same with and without its OpenMP library, errors none to lose."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numba import carray

from rollout.kernels.cpu import team
from rollout.kernels.cpu.team import Call, entry, pointer, take_jobs
from tests.engines import torch_threads


@functools.lru_cache(maxsize=1)
def counting() -> Any:
    def count(address: Any) -> None:
        block = carray(address, 4, np.int64)
        done = carray(pointer(block[3]), block[1], np.int64)
        while True:
            first, last = take_jobs(block)
            if first >= last:
                return
            for job in range(first, last):
                done[job] += 1

    return entry(count)


@pytest.mark.parametrize("library", [True, False], ids=["openmp", "python threads"])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("jobs", [0, 1, 2, 7, 1000])
def test_every_job_runs_once(library: bool, threads: int, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setattr(team, "_gomp", lambda kind: None)
    call = Call(counting(), "q")
    done = np.zeros(max(jobs, 1), np.int64)
    with torch_threads(threads):
        for cost in (1, 10**9):
            done[:] = 0
            call(jobs, cost, 1, done.ctypes.data)
            assert (done[:jobs] == 1).all() and not done[jobs:].any()


def test_torchs_own_library_is_found() -> None:
    path = team._openmp()
    assert path is not None and "omp" in path.name and team._gomp(team.ctypes.CDLL) is not None
