"""torch's OpenMP runtime: how long its threads spin, and how many of them there are."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "GOMP_SPINCOUNT"
SPINS = "10000"
"""About a tenth of a millisecond: longer than the gap between two kernels of a step, so that handing work to a thread
costs two microseconds, not forty; shorter than what would starve the other processes of a small machine."""

_LIBRARY = re.compile(r"lib(gomp|i?omp5?)[-.][^/]*so[^/]*")
_PAUSE_HARD = 2


def spin_setting() -> dict[str, str]:
    """The environment variable for a new process; what the user set stays."""
    return {VARIABLE: os.environ.get(VARIABLE, SPINS)}


def openmp_library(maps: str) -> Path | None:
    """The OpenMP library among a process's mappings (as in /proc/self/maps): torch's own copy before any other."""
    import torch

    paths = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if line.count("/")}
    found = sorted(path for path in paths if _LIBRARY.fullmatch(path.name))
    beside_torch = Path(torch.__file__).parent.parent
    return next((p for p in found if beside_torch in p.parents), found[0] if found else None)


@functools.lru_cache(maxsize=1)
def loaded_library() -> Path | None:
    """The OpenMP library that this process's torch runs on, where that can be told; looked for once."""
    import torch  # noqa: F401  # before the mappings are read: it brings the library

    try:
        return openmp_library(Path("/proc/self/maps").read_text(encoding="utf-8"))
    except OSError:
        return None


@contextmanager
def passing_team() -> Iterator[None]:
    """For work on a thread that seldom computes: the OpenMP threads it gathers end with the block.

    libgomp keeps a team for every thread that ever computed, and once all of them together are more than there are
    processors, none spins any more: handing work over then takes forty microseconds instead of two, a third of a small
    model's step. Other runtimes pause all threads at once (OpenMP 5.0, omp_pause_resource_all): only libgomp is asked.
    """
    try:
        yield
    finally:
        library = loaded_library()
        if library is not None and library.name.startswith("libgomp"):
            pause = getattr(ctypes.CDLL(str(library)), "omp_pause_resource_all", None)
            if pause is not None:
                pause(_PAUSE_HARD)
