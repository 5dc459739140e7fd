"""The parity manifest of the model that this process aligned, for the handshake."""

from __future__ import annotations

import functools
from collections.abc import Mapping


class AlignedProcess:
    """What this process has aligned; the latest counts."""

    def __init__(self) -> None:
        self.manifest: dict[str, str] | None = None


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
