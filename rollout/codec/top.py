"""TopLogprobs: two matrices of one shape; and what goes with them in answers that have no token ids."""

from __future__ import annotations

import numpy as np

from rollout.codec.fields import malformed
from rollout.codec.tensor import check_vector, tensor_from_proto, tensor_to_proto
from rollout.types import PromptChunk, SequenceScore, TopLogprobs
from rollout.v1 import rollout_pb2 as pb


def check_top(top: TopLogprobs | None, length: int, field: str) -> None:
    """Refuse anything but int32 and float32 [length, n] with n >= 1; None is fine."""
    if top is None:
        return
    ids, logprobs = top.token_ids, top.logprobs
    shape = (length, ids.shape[1] if ids.ndim == 2 else 0)
    if ids.shape != shape or logprobs.shape != shape or shape[1] < 1:
        raise malformed(
            f"{field} has shapes {list(ids.shape)} and {list(logprobs.shape)}, expected [{length}, n]", field
        )
    if ids.dtype != np.int32 or logprobs.dtype != np.float32:
        raise malformed(f"{field} is {ids.dtype.name} and {logprobs.dtype.name}, expected int32 and float32", field)


def check_rows(rows: PromptChunk | SequenceScore, field: str) -> None:
    """Refuse log-probs that are no float32 vector, and digests or alternatives of another length than theirs."""
    length = rows.logprobs.shape[0] if rows.logprobs.ndim == 1 else -1
    check_vector(rows.logprobs, np.float32, length, f"{field}.logprobs")
    if rows.row_digests is not None:
        check_vector(rows.row_digests, np.uint64, length, f"{field}.row_digests")
    check_top(rows.top, length, f"{field}.top")


def top_to_proto(top: TopLogprobs | None) -> pb.TopLogprobs | None:
    """The wire form; None leaves the field unset."""
    if top is None:
        return None
    return pb.TopLogprobs(token_ids=tensor_to_proto(top.token_ids), logprobs=tensor_to_proto(top.logprobs))


def top_from_proto(message: pb.TopLogprobs, field: str) -> TopLogprobs:
    """The record; shapes are judged by ``check_top``.

    Raises:
        RolloutError: another dtype than expected, or bytes that do not fill a shape.
    """
    return TopLogprobs(
        tensor_from_proto(message.token_ids, np.int32, f"{field}.token_ids"),
        tensor_from_proto(message.logprobs, np.float32, f"{field}.logprobs"),
    )
