"""The floor: the matrix products that a workload cannot do without, at packed rates, and nothing else.

Prefill runs in full batches of the token budget, then every sequence decodes in lockstep; each layer has weights of its
own, so that they come from memory as in a model. No embedding, norm, attention, sampling or bookkeeping.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.drivers.channel import Job, serve
from rollout.config import Settings

_STREAM_BYTES = 2**28
_STREAM_REPEATS = 5


def packed_weights(outer: int, inner: int, count: int) -> list[torch.Tensor]:
    """``count`` different weights [outer, inner] in oneDNN's layout."""
    plain = torch.randn(outer, inner, dtype=torch.bfloat16)
    return [torch.ops.mkldnn._reorder_linear_weight(plain + i, 32) for i in range(count)]


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] by a packed weight -> [T, N]."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


def prefill_batches(rows: int, budget: int) -> list[int]:
    """Rows of each prefill step: as few steps as the budget allows."""
    return [budget] * (rows // budget) + ([rows % budget] if rows % budget else [])


def necessary_rows(prompts: list[list[int]]) -> int:
    """Rows that prefill computes when what all prompts begin with is computed once."""
    shared = 0
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1 or len(prompts) == 1:
            break
        shared += 1
    return sum(map(len, prompts)) - shared * (len(prompts) - 1)


def stream_rates() -> dict[str, float]:
    """Memory bandwidth in GB/s in the manner of STREAM: arrays far larger than the caches, best of several."""
    count = _STREAM_BYTES // 4
    a, b, c = torch.empty(count), torch.ones(count), torch.ones(count)
    triad = _best(lambda: torch.add(b, c, alpha=3.0, out=a))
    copy = _best(lambda: a.copy_(b))
    read = _best(lambda: b.sum())
    return {
        "triad_gb_s": round(3 * _STREAM_BYTES / triad / 1e9, 1),
        "copy_gb_s": round(2 * _STREAM_BYTES / copy / 1e9, 1),
        "read_gb_s": round(_STREAM_BYTES / read / 1e9, 1),
    }


def _best(work: Any) -> float:
    times = []
    for _ in range(_STREAM_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


class FloorEngine:
    """The products of one model shape."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(config["threads"])
        model = json.loads((Path(config["model"]) / "config.json").read_text(encoding="utf-8"))
        hidden, inner = model["hidden_size"], model["intermediate_size"]
        dim = model.get("head_dim") or hidden // model["num_attention_heads"]
        heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
        layers = model["num_hidden_layers"]
        # (weights of all layers, inner size): q, k, v and gate, up are stacked.
        self._products = [
            (packed_weights((heads + 2 * kv_heads) * dim, hidden, layers), hidden),
            (packed_weights(hidden, heads * dim, layers), heads * dim),
            (packed_weights(2 * inner, hidden, layers), hidden),
            (packed_weights(hidden, inner, layers), inner),
        ]
        self._head = packed_weights(model["vocab_size"], hidden, 1)[0]
        self._hidden, self._layers = hidden, layers
        self._budget = Settings().engine.max_batch_tokens
        sizes = [(heads + 2 * kv_heads) * dim * hidden, hidden * heads * dim, 3 * hidden * inner]
        self._weight_bytes = 2 * (layers * sum(sizes) + model["vocab_size"] * hidden)

    def facts(self) -> dict[str, Any]:
        """Bandwidth, and the bytes that each decode step must read."""
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "weight_bytes_per_step": self._weight_bytes,
            **stream_rates(),
        }

    @torch.no_grad()
    def run(self, job: Job) -> None:
        """Every product of the job, in the order of the steps."""
        sequences = len(job.prompts) * job.samples
        for rows in prefill_batches(necessary_rows(job.prompts), self._budget):
            self._forward(rows)
        self._forward_head(len(job.prompts))
        for _ in range(job.new_tokens - 1):
            self._forward(sequences)
            self._forward_head(sequences)

    def _forward(self, rows: int) -> None:
        inputs = [torch.ones(rows, inner, dtype=torch.bfloat16) for _, inner in self._products]
        for layer in range(self._layers):
            for x, (weights, _) in zip(inputs, self._products, strict=True):
                multiply(x, weights[layer])

    def _forward_head(self, rows: int) -> None:
        multiply(torch.ones(rows, self._hidden, dtype=torch.bfloat16), self._head)


if __name__ == "__main__":
    serve(FloorEngine)
