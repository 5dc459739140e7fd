"""Log-probs of given tokens, filled in row by row: of a sequence to score, or of a prompt."""

from __future__ import annotations

import numpy as np

from rollout.types import TopLogprobs


class GivenScores:
    """Positions start .. start + count - 1. What no row has reached is NaN, never 0.0 (C1)."""

    def __init__(self, start: int, count: int, *, digests: bool, top: int) -> None:
        self.start = start
        self.logprobs = np.full(count, np.nan, np.float32)
        """[count] nats"""
        self.digests = np.zeros(count, np.uint64) if digests else None
        """[count]"""
        self.top: TopLogprobs | None = None
        if top:
            self.top = TopLogprobs(np.full((count, top), -1, np.int32), np.full((count, top), np.nan, np.float32))

    def put(self, position: int, logprob: np.float32, digest: np.uint64 | None, top: TopLogprobs | None) -> None:
        """What the row before ``position`` says about the token there; ``top`` is of one row."""
        at = position - self.start
        self.logprobs[at] = logprob
        if self.digests is not None and digest is not None:
            self.digests[at] = digest
        if self.top is not None and top is not None:
            self.top.token_ids[at] = top.token_ids[0]
            self.top.logprobs[at] = top.logprobs[0]
