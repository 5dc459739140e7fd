"""Files that appear whole or not at all, also on shared storage.

Every writer uses a name of its own and renames within one folder, which is atomic on local file systems and NFS alike;
nothing is locked, appended to or rewritten.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from rollout.errors import InvalidRequest

T = TypeVar("T")


def require_place(path: Path) -> Path:
    """The path itself, if a file can be written there: to be asked before the work, not after it.

    Raises:
        InvalidRequest: a folder, or nothing may be written there.
    """
    folder = path.resolve().parent
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder; name a file in it")
    if not folder.is_dir():
        raise InvalidRequest(f"{path} cannot be written: there is no folder {folder}; make it, or name another")
    # A device or a pipe is written to as it is; a file is renamed into place.
    device = path.exists() and not path.is_file()
    if not (os.access(path, os.W_OK) if device else os.access(folder, os.W_OK | os.X_OK)):
        raise InvalidRequest(f"{path} cannot be written: no permission; name another place")
    return path


def write_whole(path: Path, write: Callable[[BinaryIO], T], *, parents: bool = False) -> T:
    """Write beside ``path`` under a hidden name, flush to the disk, rename; what ``write`` returns.

    A device or a pipe, such as /dev/stdout, is written to as it is: to put a file in its place would remove it.

    Args:
        parents: make folders that are missing.

    Raises:
        OSError: and no file is left. Whatever ``write`` raises: likewise.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            return write(file)
    # Behind a link, and beside the file there: a rename does not cross file systems.
    path = path.resolve()
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        # A disk that is full stays fuller by what nobody can read.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return result
