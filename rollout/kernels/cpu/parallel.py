"""Threads for compiled kernels that release the GIL.

numba's own parallel loops bring a second OpenMP runtime beside torch's (the two spin against each other on few cores)
or a pool that only one thread may enter. Kernels here are plain loops over independent jobs, so a small Python pool
splits them; which thread computes a job cannot change its bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch


@functools.lru_cache(maxsize=1)
def python_threads() -> ThreadPoolExecutor:
    """The process's threads for kernels that torch's OpenMP team does not run."""
    return ThreadPoolExecutor(max_workers=64, thread_name_prefix="zerodrift-kernel")


def run_split(job_range: Callable[[int, int], None], costs: npt.NDArray[np.int64], *, worth: int) -> None:
    """Call ``job_range(first, last)`` over all jobs, in about equal shares of cost on torch's number of threads.

    Args:
        costs: [jobs], any unit. worth: cost below which a second thread does not pay; the caller then runs alone.
    """
    total = int(costs.sum())
    shares = max(1, min(torch.get_num_threads(), len(costs), total // max(worth, 1)))
    if shares == 1:
        job_range(0, len(costs))
        return
    goals = total * np.arange(1, shares) // shares
    edges = [0, *np.searchsorted(np.cumsum(costs), goals, side="right").tolist(), len(costs)]
    futures: list[Future[None]] = [python_threads().submit(job_range, a, b) for a, b in itertools.pairwise(edges[1:])]
    job_range(edges[0], edges[1])
    for future in futures:
        future.result()
