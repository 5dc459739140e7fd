"""Calls on torch's threads: every job once, the same with and without its OpenMP library, errors none to lose."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from rollout.kernels.cpu import team
from rollout.kernels.cpu.team import Call, entry, pointer, take_jobs
from rollout.openmp import openmp_library, passing_team
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
    assert team._gomp(ctypes.CDLL) is not None


def test_other_libraries_are_not_mistaken_for_it() -> None:
    """libarrow_compute has "omp" in its name; a system's libgomp may be mapped beside torch's."""
    site = Path(torch.__file__).parent.parent
    line = "7f00-7f01 r-xp 00000000 fe:00 123   "
    other = [f"{site}/pyarrow/libarrow_compute.so.2600", f"{site}/x/libcompiler.so", "[heap]"]
    ours, system = f"{site}/torch/lib/libgomp-a34b3233.so.1.0.0", "/usr/lib/libgomp.so.1"

    def chosen(*paths: str) -> Path | None:
        return openmp_library("".join(line + path + "\n" for path in (*other, *paths)))

    assert chosen() is None
    assert chosen(system) == Path(system)
    assert chosen(system, ours) == chosen(ours, system) == Path(ours)
    assert chosen(f"{site}/torch/lib/libiomp5.so") == Path(f"{site}/torch/lib/libiomp5.so")


def test_a_passing_team_ends_with_its_block() -> None:
    """More teams than processors, and libgomp lets none of them spin."""
    seen: list[int] = []

    def work() -> None:
        with passing_team():
            torch.set_num_threads(3)
            torch.ones(1 << 20).sum()
            seen.append(len(os.listdir("/proc/self/task")))
        seen.append(len(os.listdir("/proc/self/task")))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] - seen[1] == 2
