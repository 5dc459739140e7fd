"""The likeliest tokens at the rows of a step that asked for them; nobody else pays."""

from __future__ import annotations

import numpy as np
import torch

from rollout.batch import OutputRow
from rollout.logprobs import policy_logprob_rows, top_logprob_rows
from rollout.types import TopLogprobs

_SLICE = 64
"""Rows whose log-probs are held at once; rows are independent."""


def tops_of(logits: torch.Tensor, outputs: tuple[OutputRow, ...], vocab_size: int) -> list[TopLogprobs | None]:
    """logits [N, >= V] -> for each row that asked, its [1, n] top; the bits that ``TokenSampler`` works on (C1)."""
    tops: list[TopLogprobs | None] = [None] * len(outputs)
    asked = [i for i, output in enumerate(outputs) if output.sequence.top_logprobs]
    for start in range(0, len(asked), _SLICE):
        part = asked[start : start + _SLICE]
        sequences = [outputs[i].sequence for i in part]
        temperatures = torch.tensor([s.temperature for s in sequences], dtype=torch.float32)
        rows = policy_logprob_rows(logits[part], temperatures, vocab_size).cpu().numpy()
        # The first n of a longer list are the list of n.
        top = top_logprob_rows(rows, max(s.top_logprobs for s in sequences))
        for at, (i, sequence) in enumerate(zip(part, sequences, strict=True)):
            n = sequence.top_logprobs
            tops[i] = TopLogprobs(
                np.ascontiguousarray(top.token_ids[at : at + 1, :n]),
                np.ascontiguousarray(top.logprobs[at : at + 1, :n]),
            )
    return tops
