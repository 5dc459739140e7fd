"""One reader of rollout files, whatever their format, for every verb."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.errors import InvalidRequest
from tests.trainer_bridge.samples import record
from trainer_bridge.explain.command import check_order
from trainer_bridge.explain.source import Stored, read_samples
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


def test_c7_a_trainers_file_in_another_order_is_not_taken_for_other_inputs() -> None:
    """``explain`` said of two shuffled files that the ids had been encoded again."""
    ours = [record(request_id="a"), record(request_id="a", sample_index=1), record(request_id="b")]
    stored = [Stored(r) for r in ours]
    check_order(stored, ours)
    check_order(stored, [record(request_id=f"line-{i}") for i in range(3)])
    for order, place in (((1, 0, 2), 0), ((0, 2, 1), 1)):
        with pytest.raises(InvalidRequest, match=rf"sample {place} is request .* give both in one order"):
            check_order(stored, [ours[i] for i in order])
