"""C1: the one log-prob function, used by the sampler, by Score and by the training forward.

``policy_logprob`` of token t = log_softmax(float32(logits) / float32(T)) over the model's own vocabulary, taken at t.
T divides in float32, before softmax; T = 0 (greedy) scores as T = 1.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from rollout.temperature import checked_temperature
from rollout.types import Float32Array, TopLogprobs, UInt64Array

DIGEST_BYTES = 8


def effective_temperature(temperature: float) -> float:
    """The float32 value that divides the logits: T rounded once; 1 for greedy. Errors: ``checked_temperature``'s."""
    return checked_temperature(temperature, "temperature") or 1.0


def policy_logprob_rows(logits: torch.Tensor, temperatures: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Whole log-prob rows.

    Args:
        logits: [N, >= V] in the model's dtype; columns from ``vocab_size`` on are alignment padding and do not count.
        temperatures: float32 [N], > 0; see ``effective_temperature``.

    Returns:
        float32 [N, V], nats. Differentiable.
    """
    rows = logits[:, :vocab_size].to(torch.float32)
    # A tensor divisor on every path: dividing by a Python number may multiply by its reciprocal on some devices.
    return torch.log_softmax(rows / temperatures.to(rows.device, torch.float32)[:, None], dim=-1)


def policy_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Log-probs of given tokens: logits [N, >= V], token_ids int64 [N], temperatures float32 [N] -> float32 [N]."""
    rows = policy_logprob_rows(logits, temperatures, vocab_size)
    return rows.gather(1, token_ids.to(rows.device)[:, None])[:, 0]


def row_digests(logits: torch.Tensor, vocab_size: int) -> UInt64Array:
    """64-bit BLAKE2b of the bytes of each float32 logits row over the model's vocabulary: [N, >= V] -> uint64 [N].

    Equal digests: the whole distribution is the same bits, whatever the temperature.
    """
    rows: Float32Array = logits[:, :vocab_size].detach().to(torch.float32).contiguous().cpu().numpy()
    digests = (hashlib.blake2b(row.data, digest_size=DIGEST_BYTES).digest() for row in rows)
    return np.fromiter((int.from_bytes(d, "little") for d in digests), dtype=np.uint64, count=len(rows))


def top_logprob_rows(rows: Float32Array, count: int) -> TopLogprobs:
    """The likeliest tokens of log-prob rows [N, V], exact: likeliest first, ties to the lowest id -> [N, count].

    ``count`` lies in [1, V]. Rows with NaN come out as ids -1 and NaN.
    """
    ids = np.full((len(rows), count), -1, np.int32)
    values = np.full((len(rows), count), np.nan, np.float32)
    vocab = rows.shape[1]
    for i, row in enumerate(rows):
        if np.isnan(row).any():
            continue
        # The least value that still belongs; of those equal to it, the lowest ids fill what is left.
        edge = np.partition(row, vocab - count)[vocab - count]
        above = np.flatnonzero(row > edge)
        chosen = np.concatenate((above, np.flatnonzero(row == edge)[: count - len(above)]))
        chosen = chosen[np.lexsort((chosen, -row[chosen]))]
        ids[i], values[i] = chosen, row[chosen]
    return TopLogprobs(ids, values)
