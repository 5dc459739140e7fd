"""One reader of rollout files, whatever their format, for every verb."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer_bridge.samples import record
from trainer_bridge.explain.source import read_samples
from trainer_bridge.jsonl import encode, write_rollouts
from trainer_bridge.rollout_files import read_records


@pytest.mark.parametrize("name", ["r.jsonl", "r.parquet", "R.PARQUET", "rollouts"])
def test_every_verb_reads_every_format(tmp_path: Path, name: str) -> None:
    file, records = tmp_path / name, [record(), record(request_id="other")]
    if name.lower().endswith("parquet"):
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow (extra verl or dashboard)")
        from trainer_bridge.parquet import write_parquet_rollouts

        write_parquet_rollouts(file, records)
    else:
        write_rollouts(file, records)
    wanted = [encode(r) for r in records]
    assert [encode(r) for r in read_records(file)] == wanted
    assert [encode(stored.record) for stored in read_samples(file)] == wanted
