"""Folders of safetensors: which may be named, what a header must say, and that a read is whole or an error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rollout.errors import InvalidRequest, UnsupportedFeature, WeightUpdateError
from rollout.types import UpdatePolicy
from rollout.weight_folder import INDEX_FILE, folder_below, read_chunks, stored_digests, stored_tensors
from rollout.weights import digest_of
from trainer_bridge.wire import folder_update


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b.weight": torch.randn(7, generator=generator).bfloat16(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "step-1"
    path.mkdir(parents=True)
    save_file(tensors(), path / "model.safetensors")
    return path


# ---- which folder -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step-1", "./step-1", "step-1/", "step-1/."])
def test_a_folder_below_the_root(folder: Path, name: str) -> None:
    assert folder_below(str(folder.parent), name) == folder


@pytest.mark.parametrize(
    "name",
    ["..", "../root/step-1", "step-1/../../root", "/etc", "nowhere", "step-1/model.safetensors", "a\0b", "x" * 5000],
)
def test_others_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(WeightUpdateError) as caught:
        folder_below(str(folder.parent), name)
    assert caught.value.field == "begin.folder"
    assert str(folder.parent) not in caught.value.message, "the answer must not say where the root lies"
    assert len(caught.value.message) < 400


def test_links_must_not_lead_out(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    save_file(tensors(), outside / "model.safetensors")
    (folder.parent / "out").symlink_to(outside)
    (folder.parent / "in").symlink_to(folder)
    assert folder_below(str(folder.parent), "in") == folder
    with pytest.raises(WeightUpdateError):
        folder_below(str(folder.parent), "out")
    (folder / "more.safetensors").symlink_to(outside / "model.safetensors")
    with pytest.raises(WeightUpdateError, match="no file of the folder itself"):
        stored_tensors(folder)


def test_without_a_root_none_may(folder: Path) -> None:
    with pytest.raises(UnsupportedFeature, match=r"weights\.root"):
        folder_below(None, "step-1")


def test_the_root_may_itself_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(folder.parent)
    assert folder_below(str(tmp_path / "alias"), "step-1") == folder


# ---- what is read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, 3, 16, 61, 1 << 20])
def test_every_byte_once_in_bounded_buckets(folder: Path, bucket_bytes: int) -> None:
    rebuilt: dict[str, bytearray] = {}
    for bucket in read_chunks(stored_tensors(folder), bucket_bytes):
        assert sum(len(c.data) for c in bucket) <= bucket_bytes
        for chunk in bucket:
            target = rebuilt.setdefault(chunk.name, bytearray())
            assert chunk.offset == len(target)
            target.extend(bytes(chunk.data))
    for name, tensor in tensors().items():
        assert rebuilt[name] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert rebuilt.keys() == tensors().keys()
    assert stored_digests(folder, bucket_bytes=bucket_bytes) == {n: digest_of(n, t) for n, t in tensors().items()}


def test_shards_by_their_index(folder: Path) -> None:
    parts = list(tensors().items())
    for i, (name, tensor) in enumerate(parts):
        save_file({name: tensor}, folder / f"model-{i}.safetensors")
    with pytest.raises(WeightUpdateError, match=r"stands in model-\d\.safetensors and in model\.safetensors"):
        stored_tensors(folder)
    index = {"weight_map": {name: f"model-{i}.safetensors" for i, (name, _) in enumerate(parts)}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert {t.name for t in stored_tensors(folder)} == tensors().keys()


@pytest.mark.parametrize("named", ["../root/step-1/model.safetensors", "/etc/passwd", "gone.safetensors", "", "."])
def test_an_index_cannot_lead_out(folder: Path, named: str) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": named}}))
    with pytest.raises(WeightUpdateError, match="no file of the folder itself"):
        stored_tensors(folder)


TWICE = '{"weight_map": {"a": "model.safetensors", "a": "model.safetensors"}}'


@pytest.mark.parametrize(
    "text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": []}}', "\xff", "[" * 100_000, TWICE]
)
def test_a_broken_index(folder: Path, text: str) -> None:
    (folder / INDEX_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightUpdateError):
        stored_tensors(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match=r"no \*.safetensors"):
        stored_tensors(tmp_path)
    with pytest.raises(WeightUpdateError, match="there is no such folder"):
        stored_tensors(tmp_path / "gone")
    with pytest.raises(InvalidRequest, match="folder is empty; name one below the root"):
        folder_update("", tmp_path, version=1, policy=UpdatePolicy.WAIT)


# ---- headers ----------------------------------------------------------------------------------------------------


def raw(head: Any, data: bytes, length: int | None = None) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


BAD = {
    "empty file": b"",
    "short length": b"\1\0\0",
    "header longer than the file": raw({"a": entry()}, bytes(8), 1 << 40),
    "huge header": raw({"a": entry()}, bytes(8), 2**63),
    "no JSON": raw(b"{{", bytes(8)),
    "no object": raw([1], bytes(8)),
    "deep": raw(b'{"a":' * 30_000, b""),
    "name twice": raw(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[0],'
                      b'"data_offsets":[8,8]}}', bytes(8)),
    "dtype": raw({"a": entry(dtype="F8_E4M3")}, bytes(8)),
    "no dtype": raw({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "shape and bytes differ": raw({"a": entry(shape=[3])}, bytes(8)),
    "negative size": raw({"a": entry(shape=[-2])}, bytes(8)),
    "negative twice": raw({"a": entry(shape=[-1, -2])}, bytes(8)),
    "bool size": raw({"a": entry(shape=[True, 2])}, bytes(8)),
    "float size": raw({"a": entry(shape=[2.0])}, bytes(8)),
    "overlap": raw({"a": entry(), "b": entry(data_offsets=[4, 12])}, bytes(12)),
    "hole": raw({"a": entry(), "b": entry(data_offsets=[12, 20])}, bytes(20)),
    "truncated": raw({"a": entry()}, bytes(7)),
    "bytes behind": raw({"a": entry()}, bytes(9)),
    "offsets swapped": raw({"a": entry(data_offsets=[8, 0])}, bytes(8)),
    "three offsets": raw({"a": entry(data_offsets=[0, 8, 8])}, bytes(8)),
    "entry is a list": raw({"a": [1]}, bytes(8)),
}  # fmt: skip


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_bad_header_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightUpdateError, match=r"model\.safetensors is no whole safetensors file"):
        stored_tensors(tmp_path)


def test_the_same_header_without_fault(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw({"__metadata__": {"format": "pt"}, "a": entry()}, bytes(8)))
    (only,) = stored_tensors(tmp_path)
    assert (only.name, only.dtype, only.shape, only.size) == ("a", "float32", (2,), 8)


@given(st.data())
def test_a_file_with_any_bytes_changed_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Whatever is read stays inside the file, and nothing but a typed error comes out."""
    good = bytearray(raw({"a": entry(), "b": entry(dtype="BF16", shape=[2, 2], data_offsets=[8, 16])}, bytes(16)))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut: int = data.draw(st.integers(0, len(good)))
    path = tmp_path_factory.mktemp("fuzz")
    (path / "model.safetensors").write_bytes(good[: cut if data.draw(st.booleans()) else None])
    try:
        found = stored_tensors(path)
    except WeightUpdateError:
        return
    assert sum(t.size for t in found) <= len(good)
    for tensor in found:
        assert tensor.size == int(np.prod(tensor.shape)) * getattr(torch, tensor.dtype).itemsize
    assert sum(len(c.data) for bucket in read_chunks(found, 5) for c in bucket) == sum(t.size for t in found)


# ---- writers in the middle --------------------------------------------------------------------------------------


def removed(file: Path) -> None:
    file.unlink()


def shortened(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)


@pytest.mark.parametrize("change", [removed, shortened])
def test_a_file_that_changes_under_the_reader(folder: Path, change: Callable[[Path], None]) -> None:
    found = stored_tensors(folder)
    change(folder / "model.safetensors")
    with pytest.raises(WeightUpdateError, match=r"became shorter|cannot be read"):
        list(read_chunks(found, 1 << 20))
