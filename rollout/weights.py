"""C4: content digests of tensors and of whole weight sets.

BLAKE3-256: the same 128 bits of security as BLAKE2b at about five times its speed, which decides how fast an update can
be, since every byte is hashed by the sender, by each replica as it comes, and once more where it then lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from rollout.file_pages import let_go

if TYPE_CHECKING:
    from rollout.model import SharedModel

DIGEST_BYTES = 32


class TensorHasher:
    """Digest of one tensor whose bytes come in order, in parts.

    Args:
        name: as it is sent or stored; two names never share a digest.
        dtype: torch name without prefix.
        shape: of the whole tensor.
    """

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._state: Any = blake3(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode())

    def update(self, data: Any) -> None:
        """The next bytes, little-endian and in C order; a large part leaves other threads running meanwhile."""
        self._state.update(data)

    def digest(self) -> bytes:
        """BLAKE3-256 over name, dtype, shape and the bytes so far."""
        result: bytes = self._state.digest()
        return result


def tensor_digest(name: str, dtype: str, shape: tuple[int, ...], data: Any) -> bytes:
    """BLAKE3-256 over name, dtype, shape and little-endian C-order bytes."""
    hasher = TensorHasher(name, dtype, shape)
    hasher.update(data)
    return hasher.digest()


def root_digest(digests: Mapping[str, bytes]) -> str:
    """Root over all tensors, hex: BLAKE3-256 of the tensor digests in order of name."""
    result: str = blake3(b"".join(digests[name] for name in sorted(digests))).hexdigest()
    return result


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def byte_view(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes [nbytes] of a contiguous tensor on the host, shared with it."""
    flat: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def host_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes [nbytes] of any tensor, from the bytes that its device holds."""
    return byte_view(tensor.detach().cpu().contiguous())


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor as they go over the wire; no copy when it is contiguous on the host."""
    return host_bytes(tensor).data


def digest_of(name: str, tensor: torch.Tensor) -> bytes:
    """``tensor_digest`` of a torch tensor, from the bytes that its device holds."""
    return tensor_digest(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor))


def parameter_digests(model: SharedModel) -> dict[str, bytes]:
    """Canonical name -> digest of every parameter; pages of the checkpoint file that were read for it are let go."""
    digests = {}
    for name, parameter in model.parameters():
        digests[name] = digest_of(name, parameter)
        let_go([parameter])
    return digests


def model_digest(model: SharedModel) -> str:
    """Root digest of the canonical parameters: equal on rollout and trainer exactly when they hold the same bytes."""
    return root_digest(parameter_digests(model))
