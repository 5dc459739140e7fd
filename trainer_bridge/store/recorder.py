"""Write compared steps while training goes on: nothing that storage does can stop, slow or fail a step.

A thread of the recorder's own builds and writes the tables. Steps that find the queue full (storage hangs or is too
slow) and steps that cannot be written (disk full, no permission) are dropped, counted and logged.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rollout.errors import InvalidRequest
from rollout.metrics import Meter, NoMeter
from trainer_bridge.records import Comparison, ScoredSample
from trainer_bridge.store.facts import RunHead, SampleFacts, StepFacts, writer_name
from trainer_bridge.store.files import write_table, write_text
from trainer_bridge.store.schema import HEAD_NAME, TABLES, run_folder, step_folder
from trainer_bridge.store.tables import Decode, PartName, build_tables

log = logging.getLogger(__name__)
OnStep = Callable[[StepFacts, Comparison], None]


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What is kept."""

    keep_rate: float = 0.01
    """Share of samples without unequal tokens whose tokens are kept, in [0, 1]. Unequal ones are always kept."""
    queued_steps: int = 8
    """Steps that may wait for the storage; more are dropped."""

    def __post_init__(self) -> None:
        """Check."""
        if not 0.0 <= self.keep_rate <= 1.0:
            raise InvalidRequest(f"keep_rate {self.keep_rate} is not in [0, 1]", field="keep_rate")
        if self.queued_steps < 1:
            raise InvalidRequest(f"queued_steps {self.queued_steps} must be >= 1", field="queued_steps")


@dataclass(frozen=True, slots=True)
class RecordTotals:
    """What became of the steps handed over so far."""

    written: int
    dropped: int
    """Lost to full or broken storage."""
    waiting: int
    bytes: int
    """Bytes written."""
    last_error: str
    """Why the last one was dropped, "" if none was."""


@dataclass(frozen=True, slots=True)
class _Work:
    step: StepFacts
    samples: Sequence[ScoredSample]
    comparison: Comparison
    facts: Sequence[SampleFacts]


class Recorder:
    """Records one writer's part of a run. Several writers, on one machine or many, may record one run."""

    def __init__(
        self,
        root: Path,
        head: RunHead,
        *,
        options: RecordOptions | None = None,
        writer: str | None = None,
        decode: Decode | None = None,
        on_step: OnStep | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Start the thread.

        Args:
            root: the runs folder; made when it is missing.
            head: whoever writes first writes it; the others' are ignored.
            options: what is kept.
            writer: name that no other writer of the run has; None: rank 0 on this host.
            decode: ids -> text of each, for the dashboard; called on the recorder's thread.
            on_step: called on the recorder's thread after each step, written or not, such as a scalar sink.
            meter: receives the bridge's metrics (``zerodrift_bridge_*``).

        Errors: InvalidRequest for a bad run name. Unwritable storage is no error here: see ``totals``.
        """
        self._folder = run_folder(root, head.run)
        self._root, self._head = root, head
        self._options = options or RecordOptions()
        self._name = (writer or writer_name(), time.time_ns())
        self._decode, self._on_step = decode, on_step
        self._meter = meter or NoMeter()
        self._queue: queue.Queue[_Work | None] = queue.Queue()
        self._lock = threading.Lock()
        self._written = self._dropped = self._waiting = self._bytes = 0
        self._last_error = ""
        self._head_written = self._closed = False
        self._thread = threading.Thread(target=self._run, name="zerodrift-recorder", daemon=True)
        self._thread.start()

    def record(
        self,
        step: StepFacts,
        samples: Sequence[ScoredSample],
        comparison: Comparison,
        facts: Sequence[SampleFacts] | None = None,
    ) -> bool:
        """Hand a step over and return at once; False when it was dropped: the queue is full, or ``close`` was called.

        Args:
            step: its number and what else is known of it.
            samples: those that ``comparison`` compared; their arrays must not change any more.
            comparison: what ``compare`` said.
            facts: one a sample, in order.
        """
        known = facts if facts is not None else [SampleFacts()] * len(samples)
        if len(known) != len(samples):
            raise InvalidRequest(f"{len(samples)} samples but facts of {len(known)}", field="facts")
        with self._lock:
            full = self._waiting >= self._options.queued_steps
            closed = self._closed
            if not (full or closed):
                self._waiting += 1
                self._queue.put(_Work(step, samples, comparison, known))
                return True
        waiting = f"{self._options.queued_steps} steps already wait for the storage"
        self._drop(step.step, "the recorder was closed" if closed else waiting)
        return False

    def totals(self) -> RecordTotals:
        """Counts so far."""
        with self._lock:
            return RecordTotals(self._written, self._dropped, self._waiting, self._bytes, self._last_error)

    def close(self, timeout_s: float = 60.0) -> RecordTotals:
        """Wait for what is queued, at most ``timeout_s`` seconds; steps still waiting then are reported and lost."""
        with self._lock:
            # Behind it nothing is read any more.
            self._closed = True
            self._queue.put(None)
        self._thread.join(timeout_s)
        totals = self.totals()
        if totals.waiting:
            log.warning("%d steps were not recorded: the storage took over %.0f s", totals.waiting, timeout_s)
        return totals

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                size = self._write(work)
            except Exception as error:
                # Whatever went wrong here, the training run must not notice.
                self._drop(work.step.step, f"{type(error).__name__}: {error}")
                if not isinstance(error, OSError | pa.ArrowException):
                    log.exception("the recorder failed on step %d", work.step.step)
            else:
                with self._lock:
                    self._written += 1
                    self._bytes += size
            self._measure(work.step, work.comparison)
            if self._on_step is not None:
                try:
                    self._on_step(work.step, work.comparison)
                except Exception:
                    log.exception("the sink failed on step %d", work.step.step)
            with self._lock:
                self._waiting -= 1

    def _write(self, work: _Work) -> int:
        if not self._head_written:
            if not (self._folder / HEAD_NAME).exists():
                write_text(self._folder / HEAD_NAME, self._head.to_json())
            self._head_written = True
        writer, session = self._name
        name = PartName(writer, session, f"{writer}-{session}-{secrets.token_hex(4)}")
        tables = build_tables(
            name, work.step, work.samples, work.comparison, work.facts,
            keep_rate=self._options.keep_rate, decode=self._decode,
        )  # fmt: skip
        written: list[Path] = []
        try:
            for table in reversed(TABLES):
                content: pa.Table = getattr(tables, table)
                if table != "steps" and content.num_rows == 0:
                    continue
                path = step_folder(self._root, self._head.run, table, work.step.step) / f"{name.part}.parquet"
                write_table(path, content)
                written.append(path)
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        return sum(path.stat().st_size for path in written)

    def _measure(self, step: StepFacts, comparison: Comparison) -> None:
        run, put = self._head.run, self._meter.put
        put("zerodrift_bridge_step", float(step.step), run=run)
        self._meter.add("zerodrift_bridge_tokens", float(comparison.tokens), run=run)
        self._meter.add("zerodrift_bridge_unequal_tokens", float(comparison.unequal_tokens), run=run)
        if comparison.has_data:
            put("zerodrift_bridge_logprob_abs_diff_max", comparison.max_abs, run=run)
            put("zerodrift_bridge_probs_diff_max", comparison.probs_diff_max, run=run)
            put("zerodrift_bridge_k3_kl", comparison.k3, run=run)
        if step.weight_version is not None:
            put("zerodrift_bridge_weight_version", float(step.weight_version), run=run)
        totals = self.totals()
        put("zerodrift_bridge_steps_recorded", float(totals.written), run=run)
        put("zerodrift_bridge_steps_dropped", float(totals.dropped), run=run)

    def _drop(self, step: int, reason: str) -> None:
        with self._lock:
            self._dropped += 1
            self._last_error = reason
            dropped = self._dropped
        self._meter.put("zerodrift_bridge_steps_dropped", float(dropped), run=self._head.run)
        log.warning("step %d is not recorded (%s); %d dropped so far, training goes on", step, reason, dropped)
