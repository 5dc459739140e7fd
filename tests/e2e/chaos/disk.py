"""Records on a disk that is full half of the time: what is lost is said, what is kept is whole."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq

from trainer_bridge.collect import records_of
from trainer_bridge.compare import compare
from trainer_bridge.store import facts, files, recorder
from trainer_bridge.wire import GenerateResult


def record_on_full_disk(folder: Path, results: Sequence[GenerateResult]) -> int:
    """Record four steps, two of them on a full disk. Returns how many the recorder says it dropped; AssertionError when
    that is not two, or a file is broken."""
    records = [r for r in records_of(results) if len(r.token_ids)]
    samples = [r.scored(r.policy_logprobs) for r in records]
    comparison = compare(samples)
    head = facts.RunHead(run="chaos")
    full = False
    write = files.write_table

    def limited(path: Path, table: Any) -> None:
        if full and table.num_rows:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, table)

    written = dropped = 0
    with mock.patch.object(recorder, "write_table", limited):
        for step in range(4):
            full = step % 2 == 1
            writer = recorder.Recorder(folder, head, writer=f"chaos-{step}")
            assert writer.record(facts.StepFacts(step=step), samples, comparison)
            totals = writer.close()
            written, dropped = written + totals.written, dropped + totals.dropped
    assert (written, dropped) == (2, 2), (written, dropped)
    for path in folder.rglob("*.parquet"):
        pq.read_table(path)
    steps = {path.parent.name for path in folder.rglob("*.parquet")}
    assert not [path for path in folder.rglob("*") if "step=1" in str(path) and path.is_file()], steps
    return dropped
