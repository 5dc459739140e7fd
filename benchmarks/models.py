"""Models to measure: the demo's, and random weights in the shapes of real ones. Made once, in the cache folder."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout.assets import DEFAULT_MODEL, cache_root, prepare_model

_RECIPE = 1
"""Raised when the weights change, so that an older cached folder is not taken for the new one."""
_FINAL_NORM_GAIN, _BRANCH_GAIN, _STD = 6.0, 4.0, 0.02


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A Qwen3 shape with weights drawn by seed 0."""

    name: str
    title: str
    config: dict[str, Any] = field(default_factory=dict)


RANDOM_MODELS = {
    m.name: m
    for m in (
        RandomModel(
            "110m",
            "Qwen3 110M shape",
            {
                "hidden_size": 768,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "head_dim": 64,
                "intermediate_size": 2048,
                "vocab_size": 32768,
                "max_position_embeddings": 8192,
            },
        ),
        RandomModel(
            "06b",
            "Qwen3-0.6B shape",
            {
                "hidden_size": 1024,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 3072,
                "vocab_size": 151936,
                "max_position_embeddings": 40960,
            },
        ),
        RandomModel(
            "tiny",
            "tiny Qwen3",
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "intermediate_size": 128,
                "vocab_size": 256,
                "max_position_embeddings": 8192,
            },
        ),
    )
}
TITLES = {"smollm2": "SmolLM2-135M-Instruct"} | {m.name: m.title for m in RANDOM_MODELS.values()}


def model_folder(name: str, *, cache_dir: Path | None = None) -> Path:
    """The model's folder, made on first use.

    Raises:
        KeyError: not one of ``TITLES``.
    """
    if name == "smollm2":
        return prepare_model(DEFAULT_MODEL)
    models = (cache_dir or cache_root()) / "models"
    target = models / f"bench-{name}-r{_RECIPE}"
    if not target.is_dir():
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=models) as work:
            made = Path(work) / "model"
            write_random_model(RANDOM_MODELS[name].config, made)
            # Another process may have been first; its folder holds the same bytes.
            if not target.is_dir():
                made.rename(target)
    return target


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def write_random_model(fields: dict[str, Any], out: Path, seed: int = 0) -> None:
    """Config and bfloat16 weights, no tokenizer. Embeddings are tied.

    Plain initialisation gives logits so flat that every engine looks nearly exact, and with tied embeddings greedy
    repeats one token. So the final norm has gain 6 and what each branch adds is four times as large: the standard
    deviation of the logits is then about 3.3, the entropy 5.3 nats (110M shape).
    """
    config = Qwen3Config(
        **fields,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Qwen3ForCausalLM(config).named_parameters()}
    # numpy, since torch's normal draws depend on the processor's vector width.
    rng = np.random.default_rng(seed)
    weights = {name: _draw(name, shape, rng) for name, shape in sorted(shapes.items())}
    out.mkdir(parents=True)
    config.save_pretrained(out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def _draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    if len(shape) == 1:
        gain = _FINAL_NORM_GAIN if name == "model.norm.weight" else 1.0
        return torch.full(shape, gain, dtype=torch.bfloat16)
    std = _STD * (_BRANCH_GAIN if "o_proj" in name or "down_proj" in name else 1.0)
    return (torch.from_numpy(rng.standard_normal(shape, np.float32)) * std).bfloat16()
