"""Files of rollouts, whatever their format."""

from __future__ import annotations

from pathlib import Path

from trainer_bridge.jsonl import read_rollouts
from trainer_bridge.parquet import read_parquet_rollouts
from trainer_bridge.rollout_record import RolloutRecord


def read_records(path: Path) -> list[RolloutRecord]:
    """Records of a file of rollouts: Parquet by its name's end, else JSON Lines.

    Raises:
        InvalidRequest: naming line or row.
    """
    return list(read_parquet_rollouts(path) if path.suffix.lower() == ".parquet" else read_rollouts(path))
