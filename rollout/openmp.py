"""How long an idle OpenMP thread spins before it sleeps; read once by libgomp, when it loads."""

from __future__ import annotations

import os

VARIABLE = "GOMP_SPINCOUNT"
SPINS = "10000"
"""About a tenth of a millisecond: longer than the gap between two kernels of a step, so that handing work to a thread
costs two microseconds, not forty; shorter than what would starve the other processes of a small machine."""


def spin_setting() -> dict[str, str]:
    """The environment variable for a new process; what the user set stays."""
    return {VARIABLE: os.environ.get(VARIABLE, SPINS)}
