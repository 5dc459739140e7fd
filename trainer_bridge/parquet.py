"""Rollouts as Parquet: one sample a row, the keys and the strictness of the JSON Lines (``trainer_bridge.jsonl``)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from rollout.errors import InvalidRequest, UnsupportedFeature
from trainer_bridge.jsonl import decode, encode
from trainer_bridge.rollout_record import RolloutRecord

_BATCH = 256


def read_parquet_rollouts(path: str | os.PathLike[str]) -> Iterator[RolloutRecord]:
    """Records of a file in order; columns are those of a full or of a minimal JSON line.

    Errors: InvalidRequest naming row and column; UnsupportedFeature without pyarrow.
    """
    for number, row in enumerate(_rows(path), start=1):
        try:
            line = json.dumps(row, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"row {number}: {error}; an absent log-prob is null, an id an integer") from error
        yield decode(line, number)


def _rows(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    parquet = _pyarrow_parquet()
    from pyarrow import ArrowException

    try:
        for batch in parquet.ParquetFile(os.fspath(path)).iter_batches(batch_size=_BATCH):
            yield from batch.to_pylist()
    except ArrowException as error:
        raise InvalidRequest(f"{os.fspath(path)} is no whole Parquet file: {error}") from error


def write_parquet_rollouts(path: str | os.PathLike[str], records: Iterable[RolloutRecord]) -> int:
    """Write full rows; returns their number. Log-probs keep their bits (``logprobs_bits``)."""
    rows = [json.loads(encode(record)) for record in records]
    pyarrow = _pyarrow_parquet()
    import pyarrow as arrow

    pyarrow.write_table(arrow.Table.from_pylist(rows), os.fspath(path))
    return len(rows)


def _pyarrow_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UnsupportedFeature("Parquet needs pyarrow: pip install pyarrow, or use JSON Lines") from error
    return parquet
