"""C4: one update beside the weights being served, until it is whole and proven; then its commit.

The buckets themselves are the second copy: a stage keeps what came (with Ray: views of the node's object store, shared
by its replicas) and copies it once, at the commit. Bytes are hashed and looked through for NaN as they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from rollout.errors import ParityError, WeightUpdateError
from rollout.model import SharedModel
from rollout.types import TensorChunk, WeightState, WeightUpdate
from rollout.weight_bytes import Bytes, all_finite, blocks_of, copied, element_width, same_bytes
from rollout.weight_names import Meaning, NameRules
from rollout.weights import TensorHasher, byte_view, dtype_name, host_bytes, root_digest, tensor_bytes


@dataclass(slots=True, eq=False)
class _Incoming:
    name: str
    meaning: Meaning
    dtype: str
    shape: tuple[int, ...]
    size: int
    """bytes"""
    hasher: TensorHasher
    pieces: list[tuple[int, Bytes]] = field(default_factory=list)
    """(first byte, bytes), as they came"""
    received: int = 0
    """bytes"""
    hashed: int = 0
    """bytes from the first on that the hasher has seen"""
    finite: bool = True
    unchecked: bool = False
    """whether a piece cut an element, so that NaN must be looked for at the end"""

    def take(self, offset: int, data: Bytes) -> None:
        self.pieces.append((offset, data))
        self.received += data.size
        if self.received > self.size:
            self.check_coverage()
        in_order = offset == self.hashed
        width = element_width(self.dtype)
        cut = bool(offset % width or data.size % width)
        self.unchecked = self.unchecked or cut
        for block in blocks_of(data):
            if in_order:
                self.hasher.update(block.data)
            if not cut and self.finite:
                self.finite = all_finite(block, self.dtype)
        self.hashed += data.size if in_order else 0

    def check_coverage(self) -> None:
        """Every byte once; sorts the pieces."""
        self.pieces.sort(key=lambda piece: piece[0])
        at = 0
        for start, data in self.pieces:
            if start != at:
                what = "twice" if start < at else "never"
                raise WeightUpdateError(f"{self.name}: byte {min(start, at)} arrived {what}", field=self.name)
            at += data.size
        if at != self.size:
            raise WeightUpdateError(f"{self.name}: {at} of {self.size} bytes arrived", field=self.name)

    def digest(self) -> bytes:
        """Of the whole; after ``check_coverage``."""
        for piece in self.within(self.hashed, self.size):
            self.hasher.update(piece.data)
        self.hashed = self.size
        return self.hasher.digest()

    def within(self, start: int, stop: int) -> Iterator[Bytes]:
        """The bytes [start, stop) in order; after ``check_coverage``."""
        for offset, data in self.pieces:
            low, high = max(start - offset, 0), min(stop - offset, data.size)
            if low < high:
                yield data[low:high]

    def is_finite(self) -> bool:
        if self.unchecked:
            whole = np.concatenate([np.empty(0, np.uint8), *self.within(0, self.size)])
            self.finite, self.unchecked = self.finite and all_finite(whole, self.dtype), False
        return self.finite


@dataclass(frozen=True, slots=True)
class _Source:
    incoming: _Incoming
    start: int
    """first byte within it"""


class WeightStage:
    """Receives one update beside the weights being served; nothing is applied before ``verify`` has passed."""

    def __init__(self, model: SharedModel, update: WeightUpdate, current: WeightState) -> None:
        if update.version <= current.version:
            raise WeightUpdateError(
                f"version {update.version} does not exceed version {current.version} being served",
                field="begin.version",
            )
        self.update = update
        self._wanted = dict(model.parameters())
        self._buffers: dict[str, torch.Tensor] = dict(model.hf.named_buffers())
        embedding = model.hf.get_input_embeddings().get_parameter("weight")
        tied_to = next((n for n, p in self._wanted.items() if p is embedding), "") if model.spec.tied else ""
        self._rules = NameRules(self._wanted, buffers=self._buffers, tied_to=tied_to)
        self._incoming: dict[str, _Incoming] = {}
        self._claims: dict[str, str] = {}
        """parameter, or what is only compared -> the name that it came under"""
        self._sources: dict[str, _Source] = {}
        self._canonical: dict[str, bytes] | None = None
        """canonical name -> digest, once proven"""

    def add(self, chunk: TensorChunk) -> None:
        """Keep a byte range; its ``data`` must not change before the update has ended.

        Raises:
            WeightUpdateError: unknown or doubled name, wrong dtype or shape, range outside the tensor or sent twice.
        """
        if self._canonical is not None:
            raise WeightUpdateError("the update was already verified; nothing can be added to it", field=chunk.name)
        incoming = self._incoming.get(chunk.name) or self._open(chunk)
        if chunk.dtype != incoming.dtype or chunk.shape != incoming.shape:
            raise _misfit(chunk, incoming.dtype, incoming.shape)
        end = chunk.offset + len(chunk.data)
        if chunk.offset < 0 or end > incoming.size:
            raise WeightUpdateError(
                f"{chunk.name}: bytes [{chunk.offset}, {end}) lie outside its {incoming.size} bytes", field=chunk.name
            )
        incoming.take(chunk.offset, np.frombuffer(chunk.data, np.uint8) if len(chunk.data) else np.empty(0, np.uint8))

    def _open(self, chunk: TensorChunk) -> _Incoming:
        meaning = self._rules.meaning(chunk.name)
        dtype, shape = self._layout(meaning)
        if chunk.dtype != dtype or chunk.shape != shape:
            raise _misfit(chunk, dtype, shape)
        for claimed in meaning.parameters or (meaning.claim,):
            if claimed in self._claims:
                raise WeightUpdateError(
                    f"{claimed} arrived twice: as {self._claims[claimed]!r} and as {chunk.name!r}", field=chunk.name
                )
        size = prod(shape) * _width(dtype)
        incoming = _Incoming(chunk.name, meaning, dtype, shape, size, TensorHasher(chunk.name, dtype, shape))
        self._incoming[chunk.name] = incoming
        start = 0
        for claimed in meaning.parameters or (meaning.claim,):
            self._claims[claimed] = chunk.name
            if meaning.parameters:
                self._sources[claimed] = _Source(incoming, start)
                start += self._nbytes(claimed)
        return incoming

    def _nbytes(self, name: str) -> int:
        return self._wanted[name].numel() * self._wanted[name].element_size()

    def _layout(self, meaning: Meaning) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape that a tensor of this meaning must have."""
        if meaning.buffer:
            buffer = self._buffers[meaning.buffer]
            return dtype_name(buffer.dtype), tuple(buffer.shape)
        parts = [self._wanted[name] for name in meaning.parameters or (meaning.same_as,)]
        rest = tuple(parts[0].shape[1:])
        rows = tuple(parts[0].shape[:1]) if len(parts) == 1 else (sum(p.shape[0] for p in parts),)
        return dtype_name(parts[0].dtype), (*rows, *rest)

    def verify(self, digest: str = "") -> None:
        """Prove the set whole and equal to the sender's.

        Args:
            digest: the sender's root digest; "": that of the head.

        Raises:
            WeightUpdateError: missing, doubled or partial tensors, non-finite values, a tied head or a buffer that
                differs, a count or a root digest that differs from the sender's.
        """
        for incoming in self._incoming.values():
            incoming.check_coverage()
        missing = [name for name in self._wanted if name not in self._sources]
        if missing:
            raise WeightUpdateError(
                f"{len(missing)} of {len(self._wanted)} parameters are missing, first {missing[0]!r}"
            )
        if len(self._incoming) != self.update.num_tensors:
            raise WeightUpdateError(f"{len(self._incoming)} tensors arrived, {self.update.num_tensors} were announced")
        for name, incoming in self._incoming.items():
            if not self.update.allow_nonfinite and not incoming.is_finite():
                raise WeightUpdateError(
                    f"{name} holds NaN or infinity; send with allow_nonfinite=True if that is meant", field=name
                )
        digests = {name: incoming.digest() for name, incoming in self._incoming.items()}
        root, expected = root_digest(digests), digest or self.update.digest
        if root != expected:
            raise WeightUpdateError(
                f"root digest {root} differs from the sender's {expected or '(none was sent)'}", field="digest"
            )
        for incoming in self._incoming.values():
            self._check_copy(incoming)
        self._canonical = {name: self._canonical_digest(name, digests) for name in self._wanted}

    def _check_copy(self, incoming: _Incoming) -> None:
        """What is compared instead of written: a tied head, a buffer."""
        meaning = incoming.meaning
        if meaning.parameters:
            return
        if meaning.buffer:
            own: Any = bytes(tensor_bytes(self._buffers[meaning.buffer]))
            words = f"follows from the config, where {meaning.buffer} is"
        else:
            source = self._sources[meaning.same_as]
            own = b"".join(p.data for p in source.incoming.within(source.start, source.start + incoming.size))
            words = f"is tied to {meaning.same_as}"
        if b"".join(p.data for p in incoming.within(0, incoming.size)) != own:
            raise WeightUpdateError(f"{incoming.name} {words} but arrived with other bytes", field=incoming.name)

    def _canonical_digest(self, name: str, digests: dict[str, bytes]) -> bytes:
        if name in self._incoming:
            return digests[name]
        # It came under another name, or as a part: the canonical digest is one more pass over it.
        parameter = self._wanted[name]
        hasher = TensorHasher(name, dtype_name(parameter.dtype), tuple(parameter.shape))
        for piece in self._pieces(name):
            hasher.update(piece.data)
        return hasher.digest()

    def _pieces(self, name: str) -> Iterator[Bytes]:
        source = self._sources[name]
        return source.incoming.within(source.start, source.start + self._nbytes(name))

    @torch.no_grad()
    def commit(self) -> WeightState:
        """Write every parameter in place, so views and tied heads follow. Call between steps, after ``verify``.

        Every byte is read back from the live tensors and compared with those that were proven, so the proven digests
        are theirs, and the root returned.

        Raises:
            ParityError: a live tensor does not hold what was proven; the caller must not serve with this model again.
        """
        if self._canonical is None:
            raise WeightUpdateError("commit before verify")
        for name, parameter in self._wanted.items():
            if not self._written(name, parameter):
                raise ParityError(f"{name} does not hold the committed bytes")
        return WeightState(self.update.version, root_digest(self._canonical))

    def _written(self, name: str, parameter: torch.nn.Parameter) -> bool:
        """Write a parameter; whether it then holds what was sent."""
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            # Read through a view of its own, so that a write that went elsewhere shows.
            places = zip(self._laid(name, byte_view(parameter)), self._laid(name, host_bytes(parameter)), strict=True)
            return all(copied(piece, part, back) for (part, piece), (back, _) in places)
        host = torch.empty(parameter.shape, dtype=parameter.dtype)
        for part, piece in self._laid(name, byte_view(host)):
            part[:] = piece
        parameter.copy_(host)
        return all(same_bytes(part, piece) for part, piece in self._laid(name, host_bytes(parameter)))

    def _laid(self, name: str, whole: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """Parts of a parameter's bytes [n], each beside the piece that belongs there."""
        at = 0
        for piece in self._pieces(name):
            yield whole[at : at + piece.size], piece
            at += piece.size


def _width(dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def _misfit(chunk: TensorChunk, dtype: str, shape: tuple[int, ...]) -> WeightUpdateError:
    return WeightUpdateError(
        f"{chunk.name} arrived as {chunk.dtype} {list(chunk.shape)}, the model holds {dtype} {list(shape)}; "
        "cast once on the sender's side",
        field=chunk.name,
    )
