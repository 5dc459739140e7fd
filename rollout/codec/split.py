"""Long stream events in several messages: a prompt of 32,768 tokens with 20 alternatives each is above gRPC's 4 MiB."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.chunks import cut_prompt, cut_tokens
from rollout.codec.generate import GenerateEvent
from rollout.types import PromptChunk, TokenChunk

SPLIT_BYTES = 1024 * 1024
"""Tensor bytes of one message of a stream; well below 4 MiB, which is what a client takes that sets nothing."""


def row_bytes(top: int, *, digests: bool) -> int:
    """Most tensor bytes that one position takes: id, two log-probs, digest, alternatives."""
    return 12 + 8 * digests + 8 * top


def split_event(event: GenerateEvent, most_bytes: int = SPLIT_BYTES) -> Iterator[GenerateEvent]:
    """The event itself, or consecutive parts of a chunk that would exceed ``most_bytes``; at least one row each."""
    if not isinstance(event, TokenChunk | PromptChunk):
        yield event
        return
    length = len(event.token_ids) if isinstance(event, TokenChunk) else len(event.logprobs)
    width = 0 if event.top is None else event.top.token_ids.shape[1]
    rows = max(1, most_bytes // row_bytes(width, digests=event.row_digests is not None))
    if length <= rows:
        yield event
        return
    for first in range(0, length, rows):
        last = first + rows
        yield cut_tokens(event, first, last) if isinstance(event, TokenChunk) else cut_prompt(event, first, last)
