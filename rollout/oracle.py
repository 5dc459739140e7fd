"""An independent reference: Llama, Qwen2 and Qwen3 as dense float64 arithmetic, written from the architecture.

No Hugging Face module, no kernel of this project, no cache, one sequence at a time. A fault that both sides of the
project share (a wrong rotary base, a wrong norm) they cannot catch in each other; this can. The operations stand alone
too, so that the first unequal tensor of two sides can be judged from the inputs they share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.errors import UnsupportedFeature


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the arithmetic needs from config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    theta: float


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Sizes from the fields of a config.

    Raises:
        UnsupportedFeature: a rotary embedding that the reference does not know.
    """
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise UnsupportedFeature(f"the float64 reference knows plain rotary embedding only, not {kind!r}")
    heads = int(config["num_attention_heads"])
    return Sizes(
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocab=int(config["vocab_size"]),
        eps=float(config["rms_norm_eps"]),
        theta=float(rope.get("rope_theta") or config["rope_theta"]),
    )


def read_sizes(folder: Path) -> Sizes:
    """Sizes from a checkpoint folder."""
    return sizes_of(json.loads((folder / "config.json").read_text()))


# ---- operations -------------------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., H] over its last dimension."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def angles(positions: torch.Tensor, dim: int, theta: float) -> torch.Tensor:
    """float64 [T, D/2]: position * theta^(-2i/D)."""
    half = dim // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    return positions.to(torch.float64)[:, None] * frequency


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of [heads, T, D] by cos, sin [T, D/2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of [heads, T, D] at positions 0, 1, 2, ..."""
    angle = angles(torch.arange(x.shape[1]), x.shape[-1], theta)
    return turn(x, angle.cos(), angle.sin())


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x)."""
    return x / (1 + torch.exp(-x))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    first: int = 0,
    window: int = 0,
    shift: int = 0,
    cap: float = 0.0,
    without: int = 0,
) -> torch.Tensor:
    """Causal attention: q [H, Tq, D] are rows first, first + 1, ... of k, v [H_kv, T, D] -> [H, Tq, D].

    Args:
        window: how many keys a row sees at most; 0 is all. shift: how many keys too many (negative: too few) it sees.
        cap: of the scores, by tanh; 0 is none. without: leading keys that no row sees.
    """
    group = q.shape[0] // k.shape[0]
    row = torch.arange(first, first + q.shape[1])[:, None]
    key = torch.arange(k.shape[1])[None]
    hidden = (key > row + shift) | (key < without)
    if window:
        hidden |= key <= row - window
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        shared = head // group
        scores = q[head] @ k[shared].T * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        out[head] = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v[shared]
    return out


# ---- the whole model --------------------------------------------------------------------------------------------


class DenseOracle:
    """Weights are rounded to the served dtype, as both sides hold them; all arithmetic is float64."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, theta: float | None = None) -> None:
        from safetensors.torch import load_file

        self.sizes = read_sizes(folder)
        self.theta = theta if theta is not None else self.sizes.theta
        self._weights = {n: t.to(dtype).to(torch.float64) for n, t in load_file(folder / "model.safetensors").items()}

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _heads(self, name: str, x: torch.Tensor, count: int) -> torch.Tensor:
        """[T, hidden] -> [count, T, D]"""
        return self._linear(name, x).reshape(x.shape[0], count, self.sizes.head_dim).transpose(0, 1)

    def _attention(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        q = self._heads(f"{layer}.self_attn.q_proj", x, sizes.heads)
        k = self._heads(f"{layer}.self_attn.k_proj", x, sizes.kv_heads)
        v = self._heads(f"{layer}.self_attn.v_proj", x, sizes.kv_heads)
        if f"{layer}.self_attn.q_norm.weight" in self._weights:
            q = rms_norm(q, self._weights[f"{layer}.self_attn.q_norm.weight"], sizes.eps)
            k = rms_norm(k, self._weights[f"{layer}.self_attn.k_norm.weight"], sizes.eps)
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        out = attend(q, k, v, sizes.head_dim**-0.5)
        return self._linear(f"{layer}.self_attn.o_proj", out.transpose(0, 1).reshape(x.shape[0], -1))

    def _mlp(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        gate = self._linear(f"{layer}.mlp.gate_proj", x)
        return self._linear(f"{layer}.mlp.down_proj", silu(gate) * self._linear(f"{layer}.mlp.up_proj", x))

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float64 [T, vocab]"""
        weights, eps = self._weights, self.sizes.eps
        x = weights["model.embed_tokens.weight"][torch.tensor(list(ids))]
        for i in range(self.sizes.layers):
            layer = f"model.layers.{i}"
            x = x + self._attention(layer, rms_norm(x, weights[f"{layer}.input_layernorm.weight"], eps))
            x = x + self._mlp(layer, rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps))
        x = rms_norm(x, weights["model.norm.weight"], eps)
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        return x @ head.T[:, : self.sizes.vocab]

    def logprobs(self, ids: Sequence[int], start: int, temperature: float = 1.0) -> torch.Tensor:
        """float64 [T - start]: entry i is the log-prob of ids[start + i] given all before it."""
        rows = torch.log_softmax(self.logits(ids[:-1])[start - 1 :] / temperature, -1)
        return rows.gather(1, torch.tensor(list(ids[start:]))[:, None])[:, 0]
