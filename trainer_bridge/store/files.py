"""Files that appear whole or not at all, also on shared storage.

Every writer uses names of its own and renames within one folder, which is atomic on local file systems and NFS alike;
nothing is locked, appended to or rewritten.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP = 8192
"""Rows a group: tables are sorted by sample, so a reader of one sample skips all groups but one or two."""


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside ``path`` under a hidden name, flush to the disk, rename. Errors: OSError, and no file is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_table(path: Path, table: pa.Table) -> None:
    """One Parquet file, zstd. Errors: OSError."""
    write_whole(path, lambda file: pq.write_table(table, file, compression="zstd", row_group_size=ROW_GROUP))


def write_text(path: Path, text: str) -> None:
    """One UTF-8 file. Errors: OSError."""
    write_whole(path, lambda file: file.write(text.encode()))


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below; files that vanish meanwhile count nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(where, name)).st_size
    return total
