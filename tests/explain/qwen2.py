"""A tiny Qwen2: biases on q, k and v, and three query heads a KV head."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def tiny_qwen2(folder: Path) -> Path:
    """Write the folder and return it; the same weights every time."""
    config = Qwen2Config(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=80,
        vocab_size=64, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 + ("norm" in name))
    model.save_pretrained(folder)
    return folder
