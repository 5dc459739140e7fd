"""Cheap digests of activations, recorded while serving: one 64-bit hash a token and layer, of its key and value.

What attention reads is the one thing that every path of a model has in common, fused or not, so the digests of a
rollout and of a trainer can be compared without replaying either. The first layer and token at which they differ
bounds the fault to one layer. Nothing is hashed unless ``engine.activation_log`` names a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollout.errors import InvalidRequest
from rollout.kernels.base import KVStore
from rollout.strict_json import strict_loads
from rollout.types import UInt64Array

FORMAT = "zerodrift.activations/1"


@dataclass(frozen=True, slots=True, eq=False)
class ActivationDigests:
    """Digests of one sample."""

    sample_id: str
    token_ids: tuple[int, ...]
    """[S] whose keys and values were computed"""
    layers: UInt64Array
    """[layers, S]"""


def digest_rows(*parts: torch.Tensor) -> UInt64Array:
    """64-bit BLAKE2b of each row's bytes, over several tensors of T rows: uint64 [T]."""
    flat = [p.detach().reshape(len(p), -1).contiguous().view(torch.uint8).cpu().numpy() for p in parts]
    found = np.empty(len(flat[0]), np.uint64)
    for i, rows in enumerate(zip(*flat, strict=True)):
        state = hashlib.blake2b(rows[0].data, digest_size=8)
        for row in rows[1:]:
            state.update(row.data)
        found[i] = int.from_bytes(state.digest(), "little")
    return found


def digests_of_store(sample_id: str, token_ids: tuple[int, ...], store: KVStore, pages: list[int]) -> ActivationDigests:
    """Digests of the keys and values that a sequence's pages hold."""
    page = store.layout.page_size
    position = torch.arange(len(token_ids))
    table = torch.tensor(pages, dtype=torch.int64)
    slots = table[position // page] * page + position % page if len(token_ids) else position
    layers = [digest_rows(*store.read(layer, slots)) for layer in range(store.layout.num_layers)]
    return ActivationDigests(sample_id, token_ids, np.stack(layers))


def encode(digests: ActivationDigests) -> str:
    """One JSON line."""
    return json.dumps(
        {
            "format": FORMAT,
            "sample_id": digests.sample_id,
            "token_ids": list(digests.token_ids),
            "layers": [layer.astype("<u8").tobytes().hex() for layer in digests.layers],
        },
        separators=(",", ":"),
    )


def read_activations(path: Path) -> Iterator[ActivationDigests]:
    """Records of a file.

    Raises:
        InvalidRequest: naming the line that is no such record.
    """
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            value = strict_loads(line.decode("utf-8"))
            if value["format"] != FORMAT:
                raise ValueError(f"format {value['format']!r}")
            layers = np.stack([np.frombuffer(bytes.fromhex(layer), "<u8") for layer in value["layers"]])
            yield ActivationDigests(str(value["sample_id"]), tuple(value["token_ids"]), layers.astype(np.uint64))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path}, line {number}: not {FORMAT}: {error}") from error


class ActivationLog:
    """Appends one line a sample to a file, which is open for that long only."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def add(self, digests: ActivationDigests) -> None:
        """Write one line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(encode(digests) + "\n")
