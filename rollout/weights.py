"""C4: content digests of weight sets, and the staging of an update until it is whole and proven."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from rollout.errors import WeightUpdateError
from rollout.model import SharedModel
from rollout.types import TensorChunk, WeightState, WeightUpdate

DIGEST_BYTES = 32
HEAD_NAME = "lm_head.weight"


def tensor_digest(name: str, dtype: str, shape: tuple[int, ...], data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE2b-256 over name, dtype, shape and little-endian C-order bytes."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    state.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode())
    state.update(data)
    return state.digest()


def root_digest(digests: Mapping[str, bytes]) -> str:
    """Root over all tensors, hex: BLAKE2b-256 of the tensor digests in order of name."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(digests):
        state.update(digests[name])
    return state.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor as they go over the wire; no copy when it is contiguous on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def digest_of(name: str, tensor: torch.Tensor) -> bytes:
    """``tensor_digest`` of a torch tensor."""
    return tensor_digest(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor))


def model_digest(model: SharedModel) -> str:
    """Root digest of the canonical parameters: equal on rollout and trainer exactly when they hold the same bytes."""
    return root_digest({name: digest_of(name, p) for name, p in model.parameters()})


@dataclass(slots=True, eq=False)
class _Incoming:
    tensor: torch.Tensor
    buffer: np.ndarray
    """uint8 [bytes] view of ``tensor``"""
    ranges: list[tuple[int, int]]
    """byte ranges received"""


class WeightStage:
    """Receives one update beside the weights being served; nothing is applied before ``verified`` has passed."""

    def __init__(self, model: SharedModel, update: WeightUpdate, current: WeightState) -> None:
        if update.version <= current.version:
            raise WeightUpdateError(
                f"version {update.version} does not exceed version {current.version} being served",
                field="begin.version",
            )
        self.update = update
        self._model = model
        self._wanted = dict(model.parameters())
        self._incoming: dict[str, _Incoming] = {}
        self._checked: dict[str, torch.Tensor] | None = None

    def add(self, chunk: TensorChunk) -> None:
        """Store a byte range.

        Raises:
            WeightUpdateError: unknown name, wrong dtype or shape, range outside the tensor.
        """
        if self._checked is not None:
            raise WeightUpdateError("the update was already verified; nothing can be added to it", field=chunk.name)
        incoming = self._incoming.get(chunk.name) or self._open(chunk)
        tensor = incoming.tensor
        if chunk.dtype != dtype_name(tensor.dtype) or chunk.shape != tuple(tensor.shape):
            raise WeightUpdateError(
                f"{chunk.name} arrived as {chunk.dtype} {list(chunk.shape)}, the model holds "
                f"{dtype_name(tensor.dtype)} {list(tensor.shape)}; cast once on the sender's side",
                field=chunk.name,
            )
        end = chunk.offset + len(chunk.data)
        if chunk.offset < 0 or end > incoming.buffer.size:
            raise WeightUpdateError(
                f"{chunk.name}: bytes [{chunk.offset}, {end}) lie outside its {incoming.buffer.size} bytes",
                field=chunk.name,
            )
        incoming.buffer[chunk.offset : end] = np.frombuffer(chunk.data, np.uint8)
        incoming.ranges.append((chunk.offset, end))

    def _open(self, chunk: TensorChunk) -> _Incoming:
        parameter = self._wanted.get(chunk.name)
        if parameter is None and chunk.name == HEAD_NAME and self._model.spec.tied:
            parameter = self._model.hf.get_input_embeddings().get_parameter("weight")
        if parameter is None:
            known = ", ".join(list(self._wanted)[:3])
            raise WeightUpdateError(
                f"the model has no parameter {chunk.name!r}; it has {len(self._wanted)}, such as {known}",
                field=chunk.name,
            )
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
        self._incoming[chunk.name] = _Incoming(tensor, tensor.view(-1).view(torch.uint8).numpy(), [])
        return self._incoming[chunk.name]

    def verify(self) -> None:
        """Prove the set whole and equal to the sender's.

        Raises:
            WeightUpdateError: missing, doubled or partial tensors, non-finite values, a tied head that differs, a count
                or a root digest that differs from the sender's.
        """
        for name, incoming in self._incoming.items():
            _check_coverage(name, incoming)
        missing = [name for name in self._wanted if name not in self._incoming]
        if missing:
            raise WeightUpdateError(
                f"{len(missing)} of {len(self._wanted)} parameters are missing, first {missing[0]!r}"
            )
        if len(self._incoming) != self.update.num_tensors:
            raise WeightUpdateError(f"{len(self._incoming)} tensors arrived, {self.update.num_tensors} were announced")
        for name, incoming in self._incoming.items():
            if not bool(torch.isfinite(incoming.tensor).all()):
                raise WeightUpdateError(f"{name} holds NaN or infinity", field=name)
        digest = root_digest({name: digest_of(name, i.tensor) for name, i in self._incoming.items()})
        if digest != self.update.digest:
            raise WeightUpdateError(
                f"root digest {digest} differs from the sender's {self.update.digest}", field="digest"
            )
        self._check_tied_head()
        self._checked = {name: self._incoming[name].tensor for name in self._wanted}

    def _check_tied_head(self) -> None:
        if HEAD_NAME in self._wanted or HEAD_NAME not in self._incoming:
            return
        embedding = self._model.hf.get_input_embeddings().weight
        name = next(n for n, p in self._wanted.items() if p is embedding)
        if self._incoming[HEAD_NAME].buffer.tobytes() != self._incoming[name].buffer.tobytes():
            raise WeightUpdateError(f"{HEAD_NAME} is tied to {name} but arrived with other bytes", field=HEAD_NAME)

    @torch.no_grad()
    def commit(self) -> WeightState:
        """Write every parameter in place, so views and tied heads follow. Call between steps, after ``verify``."""
        if self._checked is None:
            raise WeightUpdateError("commit before verify")
        for name, parameter in self._wanted.items():
            parameter.copy_(self._checked[name])
        return WeightState(self.update.version, model_digest(self._model))


def _check_coverage(name: str, incoming: _Incoming) -> None:
    at = 0
    for start, end in sorted(incoming.ranges):
        if start != at:
            what = "twice" if start < at else "never"
            raise WeightUpdateError(f"{name}: byte {min(start, at)} arrived {what}", field=name)
        at = end
    if at != incoming.buffer.size:
        raise WeightUpdateError(f"{name}: {at} of {incoming.buffer.size} bytes arrived", field=name)
