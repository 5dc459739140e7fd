"""What this process knows of its aligned model: the parity manifest, and the step whose weights the rollout shares."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from rollout.types import UpdatePolicy


class AlignedProcess:
    """What this process has aligned; the latest counts."""

    def __init__(self) -> None:
        self.manifest: dict[str, str] | None = None
        self.served_step: int | None = None
        """global step under which the rollout serves the actor's present weights; None: it serves others, or unknown"""
        self.calls_cross = False
        """one generate call may go on under new weights (update policy "recompute"), so its last step tells nothing"""

    def serving(self, step: int | None, policy: UpdatePolicy) -> None:
        """Note that the rollout gets this process's weights, to serve under ``step``; None: verl did not say."""
        self.served_step = step
        self.calls_cross = policy is UpdatePolicy.RECOMPUTE


@functools.lru_cache(maxsize=1)
def aligned_process() -> AlignedProcess:
    """The process's one record, made on first use."""
    return AlignedProcess()


def remember(manifest: Mapping[str, str]) -> None:
    """Keep the manifest of a model that was just aligned."""
    aligned_process().manifest = dict(manifest)


def trainer_manifest() -> dict[str, str] | None:
    """The latest, or None: nothing was aligned here."""
    return aligned_process().manifest
