"""C4: a weight set in a folder of safetensors, read in buckets.

Files are read, not mapped: a mapped file that its writer truncates ends the process that reads it, a short read is an
error of the update. Headers are checked before anything is believed: hostile ones must not make the reader take memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rollout.errors import UnsupportedFeature, WeightUpdateError
from rollout.strict_json import strict_loads
from rollout.types import TensorChunk
from rollout.weights import TensorHasher

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies."""

    name: str
    dtype: str
    """torch name without prefix"""
    shape: tuple[int, ...]
    file: Path
    start: int
    """first byte in the file"""
    size: int
    """bytes"""


def folder_below(root: str | None, folder: str) -> Path:
    """The folder that a sender may name: below the root, also once links are followed.

    Raises:
        UnsupportedFeature: no root is configured. WeightUpdateError: outside the root, or no folder.
    """
    if root is None:
        raise UnsupportedFeature(
            "updates from a folder are off; set weights.root to the folder that trainer and server share",
            field="begin.folder",
        )
    base = Path(root).resolve()
    named = PurePosixPath(folder)
    # The message names what was sent, and never what lies where on this machine.
    if named.is_absolute() or ".." in named.parts or "\0" in folder:
        raise WeightUpdateError(
            f"begin.folder = {folder[:200]!r} must be relative to the server's weights.root, without '..'",
            field="begin.folder",
        )
    try:
        path = (base / named).resolve()
        found = path.is_dir()
    except OSError:
        found = False
    if not found or not path.is_relative_to(base):
        raise WeightUpdateError(
            f"begin.folder = {folder[:200]!r} is no folder below the server's weights.root", field="begin.folder"
        )
    return path


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of the files that the folder's index names, else of all its ``*.safetensors``; by file and offset.

    Raises:
        WeightUpdateError: no such files, a malformed header, or a name in two files.
    """
    tensors: list[StoredTensor] = []
    seen: dict[str, Path] = {}
    for file in _files(folder):
        for tensor in sorted(_header(file), key=lambda t: t.start):
            if tensor.name in seen:
                raise WeightUpdateError(
                    f"{tensor.name} stands in {seen[tensor.name].name} and in {file.name}", field=tensor.name
                )
            seen[tensor.name] = file
            tensors.append(tensor)
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            listed = sorted(set(strict_loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            raise WeightUpdateError(f"{INDEX_FILE} is no index of safetensors", field="begin.folder") from None
    else:
        listed = sorted(path.name for path in folder.glob("*.safetensors"))
    if not listed:
        # Not its name: no answer says where the root lies.
        what = "the folder holds no *.safetensors" if folder.is_dir() else "there is no such folder"
        raise WeightUpdateError(what, field="begin.folder")
    for name in listed:
        file = folder / str(name)
        # An index, or a link, must not lead out of the folder.
        if Path(str(name)).name != name or not file.is_file() or file.resolve().parent != folder.resolve():
            raise WeightUpdateError(f"{str(name)[:200]!r} is no file of the folder itself", field="begin.folder")
    return [folder / name for name in listed]


def _header(file: Path) -> list[StoredTensor]:
    def bad(why: str) -> WeightUpdateError:
        return WeightUpdateError(f"{file.name} is no whole safetensors file: {why}", field="begin.folder")

    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, total - 8):
                raise bad(f"a header of {length} bytes in a file of {total}")
            head: Any = strict_loads(stream.read(length).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise bad(type(error).__name__) from None
    if not isinstance(head, dict):
        raise bad("its header is no object")
    tensors = [
        _entry(file, str(name), value, 8 + length, bad) for name, value in head.items() if name != "__metadata__"
    ]
    at = 8 + length
    for tensor in sorted(tensors, key=lambda t: (t.start, t.size)):
        if tensor.start != at:
            raise bad(f"{tensor.name[:200]} begins at {tensor.start}, the tensor before it ends at {at}")
        at += tensor.size
    if at != total:
        raise bad(f"its tensors end at byte {at} of {total}")
    return tensors


def _entry(file: Path, name: str, value: Any, base: int, bad: Any) -> StoredTensor:
    try:
        kind, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        if kind not in _DTYPES:
            raise bad(f"{name[:200]} has dtype {str(kind)[:20]}; an update carries {', '.join(_DTYPES)}")
        dtype, width = _DTYPES[kind]
        if not whole or stop - start != prod(shape) * width:
            raise bad(f"{name[:200]} does not fill its shape")
    except (LookupError, TypeError, ValueError):
        raise bad(f"{name[:200]} has no dtype, shape and data_offsets") from None
    return StoredTensor(name, dtype, shape, file, base + start, stop - start)


def read_chunks(tensors: list[StoredTensor], bucket_bytes: int) -> Iterator[list[TensorChunk]]:
    """The tensors in buckets of at most ``bucket_bytes``; one is held at a time.

    Raises:
        WeightUpdateError: a file became shorter meanwhile.
    """
    bucket: list[TensorChunk] = []
    room = bucket_bytes
    for tensor in tensors:
        with _opened(tensor) as stream:
            at = 0
            while at < tensor.size or at == 0:
                part = np.empty(min(room, tensor.size - at), np.uint8)
                _fill(stream, part, tensor)
                bucket.append(TensorChunk(tensor.name, tensor.dtype, tensor.shape, at, part))
                at += part.size
                room -= part.size
                if room == 0:
                    yield bucket
                    bucket, room = [], bucket_bytes
                if tensor.size == 0:
                    break
    if bucket:
        yield bucket


def _opened(tensor: StoredTensor) -> BinaryIO:
    try:
        stream = tensor.file.open("rb")
        stream.seek(tensor.start)
        return stream
    except OSError as error:
        raise WeightUpdateError(f"{tensor.file.name} cannot be read: {type(error).__name__}") from None


def _fill(stream: BinaryIO, part: npt.NDArray[np.uint8], tensor: StoredTensor) -> None:
    view, at = part.data, 0
    while at < part.size:
        count = stream.readinto(view[at:])  # type: ignore[attr-defined]  # a buffered file has it
        if not count:
            raise WeightUpdateError(f"{tensor.file.name} became shorter while it was read", field=tensor.name)
        at += count


def stored_digests(folder: Path, *, bucket_bytes: int = 1 << 24) -> dict[str, bytes]:
    """Name -> digest of every tensor as it is stored, names and dtypes as in the files.

    Raises:
        WeightUpdateError: see ``stored_tensors`` and ``read_chunks``.
    """
    hashers: dict[str, TensorHasher] = {}
    for bucket in read_chunks(stored_tensors(folder), bucket_bytes):
        for chunk in bucket:
            if chunk.name not in hashers:
                hashers[chunk.name] = TensorHasher(chunk.name, chunk.dtype, chunk.shape)
            hashers[chunk.name].update(memoryview(chunk.data))
    return {name: hasher.digest() for name, hasher in hashers.items()}
