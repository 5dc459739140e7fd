"""Whether every replica holds the bytes that it should: digests of live tensors against a folder or a trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollout.errors import InvalidRequest
from rollout.types import ReplicaDigests, ServerInfo
from rollout.weight_folder import read_chunks, stored_tensors
from rollout.weight_names import HEAD_NAME
from rollout.weights import digest_of, root_digest

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class ReplicaVerdict:
    """One replica against what it should hold."""

    name: str
    version: int
    root: str
    """root digest of its live tensors, hex"""
    claimed: bool
    """whether that is the digest it says it serves"""
    differing: tuple[str, ...]
    """tensors with other bytes, in order of name"""
    missing: tuple[str, ...]
    """expected tensors that it does not hold"""
    extra: tuple[str, ...]
    """tensors it holds that nobody expects"""

    @property
    def holds(self) -> bool:
        """Whether it holds exactly the expected bytes."""
        return self.claimed and not (self.differing or self.missing or self.extra)

    @property
    def first(self) -> str:
        """First tensor at fault, or ""."""
        return min((*self.differing, *self.missing, *self.extra), default="")


def verify_replicas(info: ServerInfo, expected: Mapping[str, str] | None) -> tuple[ReplicaVerdict, ...]:
    """Judge each replica.

    Args:
        info: asked for with ``tensor_digests=True``.
        expected: parameter name -> digest, hex; None: the first replica's. What a replica claims is always checked.

    Raises:
        InvalidRequest: no replica sent digests.
    """
    if not info.replica_digests:
        raise InvalidRequest("no replica sent its digests; ask with tensor_digests=True", field="tensor_digests")
    wanted = info.replica_digests[0].tensors if expected is None else expected
    return tuple(_judge(replica, wanted) for replica in info.replica_digests)


def _judge(replica: ReplicaDigests, wanted: Mapping[str, str]) -> ReplicaVerdict:
    held = replica.tensors
    root = root_digest({name: bytes.fromhex(digest) for name, digest in held.items()})
    return ReplicaVerdict(
        replica.name,
        replica.weights.version,
        root,
        root == replica.weights.digest,
        tuple(sorted(name for name in wanted if name in held and held[name] != wanted[name])),
        tuple(sorted(wanted.keys() - held.keys())),
        tuple(sorted(held.keys() - wanted.keys())),
    )


def folder_digests(folder: Path, dtype: torch.dtype, *, tied: bool) -> dict[str, str]:
    """Digests of a checkpoint folder as a service holds it: floating tensors cast once to its dtype, one at a time.

    Args:
        dtype: the served dtype.
        tied: leave out a head that repeats the embedding.

    Raises:
        WeightUpdateError: no safetensors in the folder, or malformed ones.
    """
    digests: dict[str, str] = {}
    for stored in stored_tensors(folder):
        whole = np.empty(stored.size, np.uint8)
        for bucket in read_chunks([stored], max(stored.size, 1)):
            for chunk in bucket:
                whole[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
        tensor = torch.from_numpy(whole).view(getattr(torch, stored.dtype)).reshape(stored.shape)
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        digests[stored.name] = digest_of(stored.name, tensor).hex()
        if tied and stored.name in (HEAD_NAME, EMBEDDING):
            digests[f"\0{stored.name}"] = digest_of("", tensor).hex()
    head, embedding = digests.pop(f"\0{HEAD_NAME}", None), digests.pop(f"\0{EMBEDDING}", None)
    if head is not None and head == embedding:
        del digests[HEAD_NAME]
    return digests
