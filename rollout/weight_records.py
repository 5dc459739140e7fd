"""Records of weight updates; ``rollout.types`` passes them on."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UpdatePolicy(enum.Enum):
    """What a weight update does with requests in flight."""

    WAIT = "wait"
    """Admit nothing new, let the running ones finish under the old weights."""
    ABORT = "abort"
    """End them now; partial tokens and log-probs are returned."""
    RECOMPUTE = "recompute"
    """Rebuild their KV under the new weights and go on; spans record the change."""


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A byte range of one named tensor; large tensors come in several."""

    name: str
    dtype: str
    """torch name without prefix: "bfloat16", "float32", ..."""
    shape: tuple[int, ...]
    offset: int
    """First byte of ``data`` within the tensor's little-endian, C-order bytes."""
    data: Any
    """bytes, memoryview or uint8 array [n]; a stage keeps it until the update has ended, so it must not change"""


@dataclass(frozen=True, slots=True)
class UpdateEnd:
    """Last item of an update whose head had no digest."""

    digest: str
    """Root digest over all tensors, hex"""


UpdatePart = TensorChunk | UpdateEnd
"""What follows the head of an update."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Head of an update."""

    version: int
    """Must exceed the version being served."""
    digest: str
    """Root digest over all tensors, hex (``rollout.weights.root_digest``); "": an ``UpdateEnd`` carries it."""
    num_tensors: int
    policy: UpdatePolicy = UpdatePolicy.WAIT
    allow_nonfinite: bool = False
    """Take NaN and infinity, which are refused else."""
    folder: str = ""
    """Where the server reads the tensors, relative to its ``weights.root``; "": not from a folder."""
    transfer: str = ""
    """Ray actor that hands out the buckets; "": not through Ray."""


@dataclass(frozen=True, slots=True)
class WeightState:
    """What is being served."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class ReplicaDigests:
    """What one replica holds."""

    name: str
    weights: WeightState
    """what it says it serves"""
    tensors: Mapping[str, str]
    """parameter name -> digest of its live bytes, hex"""
