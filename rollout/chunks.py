"""Chunks of a stream joined and cut: the same rows in other portions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollout.types import PromptChunk, TokenChunk, TopLogprobs


def merge_chunks(chunks: list[TokenChunk]) -> list[TokenChunk]:
    """Join consecutive chunks of one sample that share a weight version."""
    merged: list[list[TokenChunk]] = []
    for chunk in chunks:
        if merged and merged[-1][0].weight_version == chunk.weight_version:
            merged[-1].append(chunk)
        else:
            merged.append([chunk])
    return [_join(group) for group in merged]


def _join(group: list[TokenChunk]) -> TokenChunk:
    if len(group) == 1:
        return group[0]
    digests = [c.row_digests for c in group if c.row_digests is not None]
    return replace(
        group[0],
        token_ids=np.concatenate([c.token_ids for c in group]),
        policy_logprobs=np.concatenate([c.policy_logprobs for c in group]),
        behavior_logprobs=np.concatenate([c.behavior_logprobs for c in group]),
        row_digests=np.concatenate(digests) if digests else None,
        top=join_tops([c.top for c in group]),
    )


def join_tops(tops: list[TopLogprobs | None]) -> TopLogprobs | None:
    """[l, n] each -> [sum of l, n]; None when none was asked for."""
    asked = [top for top in tops if top is not None]
    if not asked:
        return None
    return TopLogprobs(np.concatenate([t.token_ids for t in asked]), np.concatenate([t.logprobs for t in asked]))


def cut_tokens(chunk: TokenChunk, first: int, last: int | None = None) -> TokenChunk:
    """Tokens [first, last) of a chunk, contiguous in memory."""
    rows = slice(first, last)
    return replace(
        chunk,
        offset=chunk.offset + first,
        token_ids=chunk.token_ids[rows].copy(),
        policy_logprobs=chunk.policy_logprobs[rows].copy(),
        behavior_logprobs=chunk.behavior_logprobs[rows].copy(),
        row_digests=None if chunk.row_digests is None else chunk.row_digests[rows].copy(),
        top=_cut_top(chunk.top, rows),
    )


def cut_prompt(chunk: PromptChunk, first: int, last: int | None = None) -> PromptChunk:
    """Entries [first, last) of a chunk, contiguous in memory."""
    rows = slice(first, last)
    return replace(
        chunk,
        start=chunk.start + first,
        logprobs=chunk.logprobs[rows].copy(),
        row_digests=None if chunk.row_digests is None else chunk.row_digests[rows].copy(),
        top=_cut_top(chunk.top, rows),
    )


def _cut_top(top: TopLogprobs | None, rows: slice) -> TopLogprobs | None:
    return None if top is None else TopLogprobs(top.token_ids[rows].copy(), top.logprobs[rows].copy())
