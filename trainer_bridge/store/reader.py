"""Read a runs folder while others write to it.

A scan lists folders and reads what is new: one small row a part. Nothing is locked; a run or a part that vanishes
between two looks (retention) is simply gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollout.errors import InvalidRequest, NotFound
from trainer_bridge.store.cells import Cells, cells_of
from trainer_bridge.store.facts import RunHead
from trainer_bridge.store.files import folder_bytes
from trainer_bridge.store.merge import step_figures
from trainer_bridge.store.schema import HEAD_NAME, SCHEMA_VERSION, run_folder

log = logging.getLogger(__name__)
_READ_THREADS = 4
_SETTLED_NS = 2_000_000_000


@dataclass(slots=True, eq=False)
class Part:
    """One writer's part of one step, as its row in ``steps`` says."""

    path: Path
    step: int
    row: dict[str, Any]
    """without ``groups`` and ``worst``"""
    cells: dict[str, Cells]
    """dimension -> its cells"""
    worst: pa.Array
    """structs of ``schema.WORST``"""

    def table_path(self, table: str) -> Path:
        """Where the part's rows of another table lie; the file may be absent (nothing kept, or retention)."""
        return self.path.parents[2] / table / f"step={self.step}" / self.path.name


@dataclass(slots=True, eq=False)
class RunState:
    """What has been read of one run. Mutable; owned by ``RunStore`` and guarded by its lock."""

    folder: Path
    head: RunHead
    parts: dict[Path, Part] = field(default_factory=dict)
    """every part read so far, superseded ones included"""
    of_step: dict[int, dict[Path, Part]] = field(default_factory=dict)
    """the same by step; no step is empty"""
    seen: dict[str, int] = field(default_factory=dict)
    """step folder -> mtime in ns when it was listed last"""
    figures: dict[int, dict[str, Any]] = field(default_factory=dict)
    """step -> merged figures; dropped when one of its parts changes"""
    size: tuple[int, int] | None = None
    """revision and bytes when they were counted last"""
    revision: int = 0
    """grows with every change"""

    def live(self, step: int) -> list[Part]:
        """Parts that count: of each writer's sessions the newest that recorded this step."""
        mine = list(self.of_step.get(step, {}).values())
        newest: dict[str, int] = {}
        for part in mine:
            newest[part.row["writer"]] = max(newest.get(part.row["writer"], 0), part.row["session_ns"])
        return sorted((p for p in mine if p.row["session_ns"] == newest[p.row["writer"]]), key=lambda p: p.row["part"])

    @property
    def steps(self) -> list[int]:
        """Recorded steps in order."""
        return sorted(self.of_step)

    def add(self, part: Part) -> None:
        """Take a part in."""
        self.parts[part.path] = part
        self.of_step.setdefault(part.step, {})[part.path] = part
        self.figures.pop(part.step, None)

    def remove(self, path: Path) -> None:
        """Forget a part that went."""
        step = self.parts.pop(path).step
        del self.of_step[step][path]
        if not self.of_step[step]:
            del self.of_step[step]
        self.figures.pop(step, None)


class RunStore:
    """Every run under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, RunState] = {}
        self._lock = threading.RLock()
        self._refreshing = threading.Lock()

    def refresh(self) -> set[str]:
        """Read what is new; names of the runs that changed or went. A missing folder is an empty one.

        Files are read outside the lock and run by run, the latest first, so that readers never wait for the disk.
        """
        with self._refreshing:
            try:
                folders = {p.name[4:]: p for p in self.root.iterdir() if p.name.startswith("run=") and p.is_dir()}
            except FileNotFoundError:
                folders = {}
            with self._lock:
                gone = self._runs.keys() - folders.keys()
                for name in gone:
                    del self._runs[name]
            latest = sorted(folders, key=lambda name: _modified(folders[name]), reverse=True)
            return gone | {name for name in latest if self._refresh_run(name, folders[name])}

    def names(self) -> list[str]:
        """Runs, newest first."""
        with self._lock:
            return sorted(self._runs, key=lambda name: (-self._runs[name].head.created, name))

    def head(self, run: str) -> RunHead:
        """Errors: NotFound."""
        with self._lock:
            return self._run(run).head

    def size_bytes(self, run: str) -> int:
        """Bytes on disk, as of the last change."""
        with self._lock:
            state = self._run(run)
            if state.size is None or state.size[0] != state.revision:
                state.size = (state.revision, folder_bytes(run_folder(self.root, run)))
            return state.size[1]

    def revision(self, run: str) -> int:
        """Grows with every change. Errors: NotFound."""
        with self._lock:
            return self._run(run).revision

    def figures(self, run: str) -> dict[int, dict[str, Any]]:
        """Step -> figures, in order of steps. Errors: NotFound."""
        with self._lock:
            state = self._run(run)
            for step in state.steps:
                if step not in state.figures:
                    parts = state.live(step)
                    rows = [part.row for part in parts]
                    state.figures[step] = step_figures(rows, lambda parts=parts: _unequal_values(parts))  # type: ignore[misc]
            return {step: state.figures[step] for step in state.steps}

    def worst(
        self, run: str, first: int | None = None, last: int | None = None, *, limit: int = 100
    ) -> tuple[int, list[dict[str, Any]]]:
        """How many unequal tokens steps first..last list, and the ``limit`` of the largest |D|, worst first."""
        with self._lock:
            state = self._run(run)
            tables = [
                pa.Table.from_struct_array(part.worst).append_column(
                    "step", pa.repeat(pa.scalar(step), len(part.worst))
                )
                for step in state.steps
                if (first is None or step >= first) and (last is None or step <= last)
                for part in state.live(step)
                if len(part.worst)
            ]
        if not tables:
            return 0, []
        found = pa.concat_tables(tables)
        count = found.num_rows
        if count > limit:
            # Sorting by place as well is for the few that can be shown.
            sizes = np.nan_to_num(found.column("abs_delta").to_numpy(), nan=np.inf, posinf=np.inf)
            found = found.filter(pa.array(sizes >= np.partition(sizes, count - limit)[count - limit]))
        by_place = [(name, "ascending") for name in ("step", "request_id", "sample_index", "position")]
        return count, found.sort_by([("abs_delta", "descending"), *by_place]).slice(0, limit).to_pylist()

    def cells(
        self, run: str, dimension: str, first: int | None = None, last: int | None = None
    ) -> list[tuple[int, Cells]]:
        """Step and cells of every live part of steps first..last that has some. Errors: NotFound."""
        with self._lock:
            state = self._run(run)
            return [
                (step, part.cells[dimension])
                for step in state.steps
                if (first is None or step >= first) and (last is None or step <= last)
                for part in state.live(step)
                if dimension in part.cells
            ]

    def samples(self, run: str, step: int) -> list[dict[str, Any]]:
        """Kept samples of a step without their ids and text, most unequal first. Errors: NotFound."""
        hidden = {"prompt_ids", "prompt_text", "pieces", "spans", "sampling"}
        columns = [name for name in _columns("samples") if name not in hidden]
        rows = [row for t in self._read(run, step, "samples", columns) for row in t.to_pylist()]
        return sorted(rows, key=lambda r: (-(r["max_abs"] or 0.0), r["request_id"], r["sample_index"]))

    def sample(self, run: str, step: int, request_id: str, sample_index: int) -> dict[str, Any]:
        """One kept sample with its tokens as columns. Errors: NotFound with the reason."""
        chosen = (pc.field("request_id") == request_id) & (pc.field("sample_index") == sample_index)
        found = [row for t in self._read(run, step, "samples", None, chosen) for row in t.to_pylist()]
        if not found:
            raise NotFound(
                f"run {run!r} step {step} keeps no sample {sample_index} of request {request_id!r}: equal samples are "
                "kept at RecordOptions.keep_rate only, and retention may have removed them",
                field="request_id",
            )
        tokens = pa.concat_tables(list(self._read(run, step, "tokens", None, chosen))).sort_by("position")
        sample: dict[str, Any] = found[-1]
        return sample | {"token_columns": tokens.drop_columns(["request_id", "sample_index"])}

    # ---- inside -------------------------------------------------------------------------------------------------

    def _run(self, run: str) -> RunState:
        if run not in self._runs:
            raise NotFound(
                f"no run {run!r} under {self.root}; there are {', '.join(self._runs) or 'none'}", field="run"
            )
        return self._runs[run]

    def _read(
        self, run: str, step: int, table: str, columns: list[str] | None, chosen: Any = None
    ) -> Iterable[pa.Table]:
        with self._lock:
            parts = self._run(run).live(step)
        if not parts:
            raise NotFound(f"run {run!r} has no step {step}", field="step")
        for part in parts:
            # Absent: this part keeps nothing, or retention was here.
            with contextlib.suppress(FileNotFoundError):
                yield pq.read_table(part.table_path(table), columns=columns, filters=chosen, partitioning=None)

    def _refresh_run(self, name: str, folder: Path) -> bool:
        """Only ``refresh`` calls this, one at a time, so what it read of the state stays true meanwhile."""
        state = self._runs.get(name)
        fresh = state is None
        if state is None:
            head = _read_head(folder)
            if head is None:
                return False
            state = RunState(folder, head)
        new, gone = _scan(state)
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            read = [part for part in pool.map(_read_part, new) if part is not None]
        with self._lock:
            self._runs[name] = state
            for path in gone:
                state.remove(path)
            for part in read:
                state.add(part)
            if changed := bool(read or gone or fresh):
                state.revision += 1
        return changed


def _modified(folder: Path) -> float:
    # The folder of steps changes with every new step.
    for path in (folder / "steps", folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _columns(table: str) -> list[str]:
    from trainer_bridge.store import schema

    return list({"samples": schema.SAMPLES, "tokens": schema.TOKENS}[table].names)


def _read_head(folder: Path) -> RunHead | None:
    try:
        return RunHead.from_json((folder / HEAD_NAME).read_text(encoding="utf-8"))
    except (OSError, InvalidRequest) as error:
        log.debug("%s is not a run (yet): %s", folder, error)
        return None


def _scan(state: RunState) -> tuple[list[Path], list[Path]]:
    """Paths of parts that appeared and that went, in step folders that changed since the last look."""
    new: list[Path] = []
    gone: list[Path] = []
    known: dict[str, set[Path]] = {}
    for path in state.parts:
        known.setdefault(path.parent.name, set()).add(path)
    listed: set[str] = set()
    with contextlib.suppress(FileNotFoundError), os.scandir(state.folder / "steps") as entries:
        for entry in entries:
            listed.add(entry.name)
            mtime = entry.stat().st_mtime_ns
            if state.seen.get(entry.name) == mtime:
                continue
            there = {p for p in Path(entry.path).glob("*.parquet") if not p.name.startswith(".")}
            new += sorted(there - known.get(entry.name, set()))
            gone += sorted(known.get(entry.name, set()) - there)
            # A folder that changed just now may change again within the clock's grain: look once more.
            if time.time_ns() - mtime > _SETTLED_NS:
                state.seen[entry.name] = mtime
    for name in known.keys() - listed:
        gone += sorted(known[name])
        state.seen.pop(name, None)
    return new, gone


def _read_part(path: Path) -> Part | None:
    try:
        # Without the data set layer of read_table: there may be thousands of these.
        table = pq.ParquetFile(path).read()
        groups = pa.Table.from_struct_array(table.column("groups").combine_chunks().flatten())
        worst = table.column("worst").combine_chunks().flatten()
        row = table.drop_columns(["groups", "worst"]).to_pylist()[0]
        if row["schema_version"] > SCHEMA_VERSION:
            log.warning("%s has schema %d, this version reads %d", path, row["schema_version"], SCHEMA_VERSION)
            return None
        return Part(path, int(path.parent.name.removeprefix("step=")), row, cells_of(groups), worst)
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        log.warning("%s is not a readable part: %s", path, error)
        return None


def _unequal_values(parts: Iterable[Part]) -> npt.NDArray[np.float64]:
    found = [np.empty(0)]
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            table = pq.read_table(
                part.table_path("tokens"), columns=["abs_delta"], filters=pc.field("ulp") > 0, partitioning=None
            )
            found.append(table.column("abs_delta").to_numpy())
    return np.concatenate(found)
