"""A file is there whole or as it was; a pipe stays a pipe."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from rollout.errors import InvalidRequest
from rollout.whole_files import require_place, write_whole


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> int:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2
        return 7

    assert write_whole(path, write) == 7
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path, fault: BaseException) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise fault

    with pytest.raises(type(fault)):
        write_whole(path, write)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to(target)
    for content in (b"first", b"second"):
        write_whole(link, lambda file, content=content: file.write(content))  # type: ignore[misc]
        assert link.is_symlink() and target.read_bytes() == content
    assert list((tmp_path / "there").iterdir()) == [target]


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, lambda file: file.write(b"through"))
    reader.join(10)
    assert read == [b"through"] and pipe.is_fifo()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_whole(tmp_path / "nowhere" / "a", lambda file: file.write(b"x"))


def test_a_place_is_judged_before_the_work(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_bytes(b"x")
    taken.chmod(0o400)
    # Renamed into place, so the old file's own mode does not matter.
    for fine in (tmp_path / "new", taken, Path("/dev/null")):
        assert require_place(fine) == fine
    for bad, fault in ((tmp_path, "is a folder"), (tmp_path / "no" / "x", "no folder"), (taken / "x", "no folder")):
        with pytest.raises(InvalidRequest, match=fault):
            require_place(bad)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["taken"]
