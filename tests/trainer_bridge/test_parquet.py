"""Rollouts as Parquet, exact to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout.errors import InvalidRequest
from rollout.types import VersionSpan
from tests.trainer_bridge.samples import f32, record
from trainer_bridge.parquet import read_parquet_rollouts, write_parquet_rollouts

pytest.importorskip("pyarrow", reason="Parquet needs pyarrow (extra verl or dashboard)")


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    values = np.nextafter(f32([-1.0, -0.1, 0.0]), np.float32(-1), dtype=np.float32)
    values[2] = np.nan
    records = [
        record(values, mask=[1, 1, 0], spans=(VersionSpan(4, 0, 3),)),
        record([-0.3], request_id="r1", replica="x"),
    ]
    assert write_parquet_rollouts(tmp_path / "r.parquet", records) == 2
    back = list(read_parquet_rollouts(tmp_path / "r.parquet"))
    for before, after in zip(records, back, strict=True):
        assert before.policy_logprobs.tobytes() == after.policy_logprobs.tobytes()
        assert before.mask.tolist() == after.mask.tolist() and before.token_ids.tolist() == after.token_ids.tolist()
        assert (before.request_id, before.spans, before.sampling, before.replica) == (
            after.request_id,
            after.spans,
            after.sampling,
            after.replica,
        )


def test_another_engines_minimal_columns(tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    row = {"prompt_ids": [5, 6], "token_ids": [7, 8], "logprobs": [-1.5, None], "temperature": 0.7}
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "m.parquet")
    (one,) = read_parquet_rollouts(tmp_path / "m.parquet")
    assert one.mask.tolist() == [True, False] and one.temperature == 0.7 and one.mode is None
    parquet.write_table(arrow.Table.from_pylist([row | {"reward": 1.0}]), tmp_path / "u.parquet")
    with pytest.raises(InvalidRequest, match="line 1, key 'reward': unknown"):
        list(read_parquet_rollouts(tmp_path / "u.parquet"))


@pytest.mark.parametrize("cut", [0, 4, -8])
def test_a_file_that_is_not_whole(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "r.parquet"
    write_parquet_rollouts(path, [record([-0.3])])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InvalidRequest, match=r"r\.parquet is no whole Parquet file"):
        list(read_parquet_rollouts(path))


def test_columns_of_types_that_json_has_not(tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    row = {"prompt_ids": [1], "token_ids": [b"\x02"], "logprobs": [-1.0], "temperature": 1.0}
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "r.parquet")
    with pytest.raises(InvalidRequest, match=r"row 1: .*bytes"):
        list(read_parquet_rollouts(tmp_path / "r.parquet"))
