"""The store's files, each written once and whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.whole_files import write_whole

ROW_GROUP = 8192
"""Rows a group: tables are sorted by sample, so a reader of one sample skips all groups but one or two."""


def write_table(path: Path, table: pa.Table) -> None:
    """One Parquet file, zstd. Errors: OSError."""
    write_whole(
        path,
        lambda file: pq.write_table(table, file, compression="zstd", row_group_size=ROW_GROUP),
        parents=True,
    )


def write_text(path: Path, text: str) -> None:
    """One UTF-8 file. Errors: OSError."""
    write_whole(path, lambda file: file.write(text.encode()), parents=True)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below; files that vanish meanwhile count nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(where, name)).st_size
    return total
