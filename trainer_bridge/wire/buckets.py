"""Tensors to the messages of an UpdateWeights stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollout import codec
from rollout.errors import InvalidRequest
from rollout.types import TensorChunk, UpdateEnd, UpdatePolicy, WeightUpdate
from trainer_bridge.wire.tensors import NamedTensor, layout, raw_bytes

DEFAULT_BUCKET_BYTES = 1024 * 1024
"""Small enough for memory that was just freed: what is asked of the system anew costs more than the copies."""


def plan_update(
    tensors: Sequence[NamedTensor],
    *,
    version: int,
    digest: str | None,
    policy: UpdatePolicy,
    allow_nonfinite: bool = False,
    transfer: str = "",
) -> WeightUpdate:
    """Head of the update. Without a digest the end of the stream carries it, computed while the tensors are sent.

    Args:
        tensors: from ``named_tensors``.

    Raises:
        InvalidRequest: no such policy.
    """
    if policy not in set(UpdatePolicy):
        known = ", ".join(str(one) for one in UpdatePolicy)
        raise InvalidRequest(f"policy = {policy!r} is no UpdatePolicy; use {known}", field="policy")
    return WeightUpdate(
        version=version,
        digest=digest or "",
        num_tensors=len(tensors),
        policy=policy,
        allow_nonfinite=allow_nonfinite,
        transfer=transfer,
    )


def folder_update(
    folder: str, root: Path, *, version: int, policy: UpdatePolicy, allow_nonfinite: bool = False
) -> WeightUpdate:
    """Head of an update whose tensors the server reads; its digest is that of the folder as this process sees it.

    Args:
        folder: relative to the server's ``weights.root``.
        root: the same root, where this process sees it.

    Raises:
        InvalidRequest: no folder is named. WeightUpdateError: outside the root, no safetensors there, or malformed
            ones.
    """
    if not folder:
        raise InvalidRequest("folder is empty; name one below the root, '.' for the root itself", field="folder")
    from rollout.weight_folder import folder_below, stored_digests
    from rollout.weights import root_digest

    digests = stored_digests(folder_below(str(root), folder))
    return WeightUpdate(version, root_digest(digests), len(digests), policy, allow_nonfinite, folder)


def update_messages(
    update: WeightUpdate, tensors: Sequence[NamedTensor], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[bytes]:
    """Serialized: head, then buckets of at most ``bucket_bytes`` tensor bytes; a large tensor is split over several.

    Where the head has no digest, each tensor is hashed as it goes, and the end says the root.

    Raises:
        InvalidRequest: ``bucket_bytes`` < 1.
    """
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise InvalidRequest(f"bucket_bytes = {bucket_bytes} must be an integer >= 1", field="bucket_bytes")
    return _ahead(_messages(update, tensors, bucket_bytes))


def _ahead(messages: Iterator[bytes]) -> Iterator[bytes]:
    """The same, each made by a thread while the one before it is sent: gRPC asks for one at a time."""
    with ThreadPoolExecutor(1, thread_name_prefix="zerodrift-update") as thread:
        coming = thread.submit(next, messages, None)
        while (message := coming.result()) is not None:
            coming = thread.submit(next, messages, None)
            yield message


def _messages(update: WeightUpdate, tensors: Sequence[NamedTensor], bucket_bytes: int) -> Iterator[bytes]:
    yield codec.update_to_proto(update).SerializeToString()
    digests: dict[str, bytes] = {}
    for bucket in cut(tensors, bucket_bytes, None if update.digest else digests):
        yield codec.bucket_to_wire(bucket)
    if not update.digest:
        yield codec.end_to_proto(end_of(digests)).SerializeToString()


def end_of(digests: Mapping[str, bytes]) -> UpdateEnd:
    """The end of an update whose tensors have these digests."""
    from rollout.weights import root_digest

    return UpdateEnd(root_digest(digests))


def cut(
    tensors: Sequence[NamedTensor], bucket_bytes: int, digests: dict[str, bytes] | None = None
) -> Iterator[list[TensorChunk]]:
    """Buckets of at most ``bucket_bytes`` bytes, each chunk a view of its tensor.

    Args:
        digests: receives each tensor's digest once its last byte went; None: nothing is hashed.
    """
    from rollout.weights import TensorHasher

    bucket: list[TensorChunk] = []
    room = bucket_bytes
    for name, value in tensors:
        dtype, shape = layout(value)
        data = raw_bytes(value)
        offset = 0
        hasher = None if digests is None else TensorHasher(name, dtype, shape)
        # At least one chunk a tensor, so that one without elements arrives too.
        while offset < data.size or offset == 0:
            part = data[offset : offset + room]
            if hasher is not None:
                hasher.update(part.data)
            bucket.append(TensorChunk(name=name, dtype=dtype, shape=shape, offset=offset, data=part))
            offset += len(part)
            room -= len(part)
            if room == 0:
                yield bucket
                bucket, room = [], bucket_bytes
            if data.size == 0:
                break
        if hasher is not None and digests is not None:
            digests[name] = hasher.digest()
    if bucket:
        yield bucket
