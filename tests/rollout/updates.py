"""Weight updates for tests: tensors as wire chunks, and their root digest computed apart from ``rollout.weights``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from blake3 import blake3

from rollout.types import TensorChunk


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).split(".")[1]


def chunks_of(tensors: Mapping[str, torch.Tensor], size: int = 1 << 20) -> Iterator[TensorChunk]:
    for name, tensor in tensors.items():
        data = raw_bytes(tensor)
        for at in range(0, len(data), size):
            yield TensorChunk(name, dtype_of(tensor), tuple(tensor.shape), at, data[at : at + size])


def digest_over(tensors: Mapping[str, torch.Tensor]) -> str:
    """BLAKE3-256 over the BLAKE3-256 of every tensor, in order of name; see C4."""
    root = blake3()
    for name in sorted(tensors):
        tensor = tensors[name]
        head = f"{name}\0{dtype_of(tensor)}\0{','.join(str(s) for s in tensor.shape)}\0"
        root.update(blake3(head.encode() + raw_bytes(tensor)).digest())
    return root.hexdigest()
