"""Keep a runs folder within limits: tokens of old runs go first, whole old runs after them, the newest run never."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rollout.errors import InvalidRequest
from trainer_bridge.store.files import folder_bytes
from trainer_bridge.store.reader import RunStore
from trainer_bridge.store.schema import run_folder

STALE_PARTIAL_S = 3600.0
"""A hidden file this old was left by a writer that died."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Something that was deleted."""

    run: str
    what: str
    """"tokens" (with the samples) or "run"."""
    bytes: int


def prune(root: Path, *, keep_runs: int | None = None, max_bytes: int | None = None) -> list[Removed]:
    """Delete until at most ``keep_runs`` runs and ``max_bytes`` bytes are left; returns what went, in order.

    The newest run is never touched: it may be being written. Errors: InvalidRequest for limits that cannot be.
    """
    if keep_runs is not None and keep_runs < 1:
        raise InvalidRequest(f"keep_runs {keep_runs} must be >= 1", field="keep_runs")
    if max_bytes is not None and max_bytes < 0:
        raise InvalidRequest(f"max_bytes {max_bytes} must be >= 0", field="max_bytes")
    store = RunStore(root)
    store.refresh()
    names = store.names()
    removed: list[Removed] = []
    for name in names[keep_runs:] if keep_runs is not None else []:
        removed.append(_remove_run(root, name))
    left = names[:keep_runs]
    _remove_partials(root)
    if max_bytes is None:
        return removed
    sizes = {name: folder_bytes(run_folder(root, name)) for name in left}
    for name in reversed(left[1:]):
        if sum(sizes.values()) > max_bytes:
            gone = _remove_tokens(root, name)
            if gone.bytes:
                removed.append(gone)
                sizes[name] -= gone.bytes
    for name in reversed(left[1:]):
        if sum(sizes.values()) > max_bytes:
            removed.append(_remove_run(root, name))
            del sizes[name]
    return removed


def _remove_run(root: Path, name: str) -> Removed:
    folder = run_folder(root, name)
    size = folder_bytes(folder)
    # Out of sight first, so that no reader meets half a run.
    hidden = folder.with_name(f".removed-{name}-{time.time_ns()}")
    folder.rename(hidden)
    shutil.rmtree(hidden)
    return Removed(name, "run", size)


def _remove_tokens(root: Path, name: str) -> Removed:
    size = 0
    for table in ("tokens", "samples"):
        folder = run_folder(root, name) / table
        size += folder_bytes(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return Removed(name, "tokens", size)


def _remove_partials(root: Path) -> None:
    limit = time.time() - STALE_PARTIAL_S
    for path in root.glob("run=*/*/step=*/.*"):
        if path.stat().st_mtime < limit:
            path.unlink(missing_ok=True)
