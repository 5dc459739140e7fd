"""The shared model definition: a Hugging Face architecture plus a kernel set. Both sides load through it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from rollout.attention import AttentionStep, register_interface
from rollout.checkpoint import eos_token_ids, load_checkpoint, read_config
from rollout.errors import InvalidRequest, UnsupportedFeature
from rollout.kernels.base import KernelSet
from rollout.multimodal import ARCHITECTURES as MULTIMODAL
from rollout.multimodal import VisionPart, VisualRows, check_inputs, is_multimodal

ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}) | MULTIMODAL
"""Proven bit-equal between decode, prefill and training by tests/parity."""
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""The others rescale by the longest position in the call, so a stranger in the batch would change your rotation."""
ACTIVATIONS = frozenset({"silu", "swish"})
"""Two names of one function, the only one that the fused forward of the rollout has."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes the engine needs."""

    name: str
    vocab_size: int
    """config.vocab_size: the C1 vocabulary"""
    context_length: int
    """tokens"""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    tied: bool
    """lm_head shares the embedding"""


def required_features(config: PretrainedConfig) -> list[tuple[str, str]]:
    """(feature, config field that asks for it) beyond plain causal attention; a kernel set must list each."""

    def get(name: str) -> Any:
        return getattr(config, name, None)

    layers = set(get("layer_types") or ())
    window = get("sliding_window") is not None and get("use_sliding_window") is not False
    wanted = [
        ("sliding_window", "sliding_window", window or any("sliding" in kind or "chunked" in kind for kind in layers)),
        (
            "linear_attention",
            "layer_types",
            any("linear" in kind or "mamba" in kind or "conv" in kind for kind in layers),
        ),
        ("softcap", "attn_logit_softcapping", bool(get("attn_logit_softcapping") or get("final_logit_softcapping"))),
        ("mla", "kv_lora_rank", bool(get("kv_lora_rank"))),
        ("alibi", "alibi", bool(get("alibi"))),
        ("moe", "num_experts", bool(get("num_experts") or get("num_local_experts") or get("n_routed_experts"))),
        ("attention_sinks", "model_type", get("model_type") == "gpt_oss"),
        ("fp8", "quantization_config", bool(get("quantization_config"))),
    ]
    return [(feature, field) for feature, field, present in wanted if present]


def check_supported(config: PretrainedConfig, kernels: KernelSet, dtype: torch.dtype) -> None:
    """Refuse by name what the kernel set or the shared model cannot do exactly.

    Raises:
        UnsupportedFeature: naming feature, config field and kernel set.
    """
    name = (config.architectures or [config.model_type])[0]
    check_inputs(config)
    config = config.get_text_config()
    for feature, field in required_features(config):
        kernels.require(feature, f"model {name} (config field {field})")
    if name not in ARCHITECTURES:
        raise UnsupportedFeature(
            f"architecture {name} is not proven bit-equal here; supported: {sorted(ARCHITECTURES)}"
        )
    _check_rope(config)
    activation = str(getattr(config, "hidden_act", "silu"))
    if activation not in ACTIVATIONS:
        raise UnsupportedFeature(
            f"hidden_act {activation!r} of {name} is not proven bit-equal here; supported: {sorted(ACTIVATIONS)}"
        )
    if dtype not in kernels.capabilities.dtypes:
        raise UnsupportedFeature(f"kernel set {kernels.name!r} does not support dtype {dtype}")
    head_dim = _head_dim(config)
    if head_dim > kernels.capabilities.max_head_dim:
        raise UnsupportedFeature(
            f"head dim {head_dim} exceeds {kernels.capabilities.max_head_dim} of kernel set {kernels.name!r}"
        )


def _check_rope(config: PretrainedConfig) -> None:
    """Every rotary option is honoured or refused: transformers passes over those that it does not know."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in ROPE_TYPES:
        raise UnsupportedFeature(
            f"rotary embedding type {kind!r} depends on the other sequences of a call; supported: {sorted(ROPE_TYPES)}"
        )
    by_layer = sorted(key for key, value in rope.items() if isinstance(value, Mapping))
    if by_layer:
        raise UnsupportedFeature(
            f"rope_parameters for kinds of layers ({', '.join(by_layer)}) would be ignored by this architecture; give "
            "one set for all layers"
        )
    if kind == "default" and float(rope.get("factor") or 1.0) != 1.0:
        raise UnsupportedFeature(
            f"rope_parameters have factor {rope['factor']} and no rope_type, so the factor would be ignored; add "
            f"rope_type, one of {sorted(ROPE_TYPES - {'default'})}, or remove the factor"
        )
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if part is not None and float(part) != 1.0:
        raise UnsupportedFeature(
            f"partial_rotary_factor {part} would be ignored by this architecture, which rotates whole heads; remove it"
        )


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class SharedModel:
    """A Hugging Face causal LM bound to a kernel set."""

    def __init__(
        self, hf: PreTrainedModel, kernels: KernelSet, spec: ModelSpec, vision: VisionPart | None = None
    ) -> None:
        self.hf = hf
        self.kernels = kernels
        self.spec = spec
        self.vision = vision
        """the tower of a multimodal model"""
        self._decoder = hf.get_decoder()
        self._head: torch.nn.Module = hf.get_output_embeddings()

    def hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, visual: VisualRows | None = None
    ) -> torch.Tensor:
        """Final hidden states of packed rows: input_ids, positions int64 [T] -> [T, hidden]. Call in invariant mode.

        Args:
            visual: for a multimodal model, which rows are features and M-RoPE's positions; None: text alone.
        """
        ids = input_ids.to(self.device)
        if self.vision is None:
            inputs = {"input_ids": ids[None], "position_ids": positions.to(self.device)[None]}
        else:
            inputs = self._multimodal_inputs(ids, positions, visual)
        hidden: torch.Tensor = self._decoder(**inputs, use_cache=False, attention_step=step).last_hidden_state[0]
        return hidden

    def _multimodal_inputs(
        self, ids: torch.Tensor, positions: torch.Tensor, visual: VisualRows | None
    ) -> dict[str, Any]:
        embeds = self.hf.get_input_embeddings()(ids)
        rope = positions.expand(3, -1) if visual is None else visual.rope_positions
        extra: dict[str, Any] = {}
        if visual is not None and visual.features is not None:
            rows = visual.rows.to(self.device)
            embeds = embeds.index_copy(0, rows, visual.features.embeds.to(embeds.dtype))
            if visual.features.deepstack:
                mask = torch.zeros(len(ids), dtype=torch.bool, device=self.device).index_fill_(0, rows, True)
                extra = {
                    "visual_pos_masks": mask[None],
                    "deepstack_visual_embeds": list(visual.features.deepstack),
                }
        return {"inputs_embeds": embeds[None], "position_ids": rope.to(self.device)[:, None], **extra}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """lm_head in the model's dtype: [N, hidden] -> [N, >= vocab_size]."""
        result: torch.Tensor = self._head(hidden)
        return result

    @property
    def device(self) -> torch.device:
        """Where weights and activations are; ids, positions and tables may come from the host."""
        return self.kernels.device

    @property
    def head_dtype(self) -> torch.dtype:
        """dtype of the lm_head's weights."""
        return next(self._head.parameters()).dtype

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Canonical (name, parameter) pairs: a tied head appears once, under the embedding's name."""
        return self.hf.named_parameters()


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    kernels: KernelSet,
    context_length: int | None = None,
    trainable: bool = False,
    vision_attention: str = "auto",
) -> SharedModel:
    """Load a checkpoint folder (config.json, safetensors) for either side.

    Args:
        dtype: parameters are cast to it once, on load.
        context_length: shorter limit than the config's; None keeps the config's.
        trainable: keep gradients on (the trainer's side).
        vision_attention: provider of a vision tower's attention; see ``resolve_vision``.

    Raises:
        NotFound: no such folder. UnsupportedFeature: see ``check_supported``. InvalidRequest: context too long.
        ConfigError: files that cannot be read, or weights that are not whole; see ``rollout.checkpoint``.
    """
    folder = Path(path)
    config = read_config(folder)
    check_supported(config, kernels, dtype)
    multimodal = is_multimodal(config)
    text = config.get_text_config()
    longest = int(text.max_position_embeddings)
    if context_length is not None and not 2 <= context_length <= longest:
        raise InvalidRequest(f"context_length {context_length} is outside [2, {longest}]", field="model.context_length")
    eos = eos_token_ids((config, text), folder, int(text.vocab_size))
    loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    hf = load_checkpoint(loader, folder, dtype, register_interface())
    hf.eval()
    hf.requires_grad_(trainable)
    module: torch.nn.Module = hf
    module.to(kernels.device)
    kernels.adapt(hf)
    spec = ModelSpec(
        name=folder.name,
        vocab_size=int(text.vocab_size),
        context_length=context_length or longest,
        num_layers=int(text.num_hidden_layers),
        num_kv_heads=int(text.num_key_value_heads),
        head_dim=_head_dim(text),
        eos_token_ids=eos,
        dtype=dtype,
        tied=bool(config.tie_word_embeddings),
    )
    return SharedModel(hf, kernels, spec, VisionPart(hf, kernels, vision_attention) if multimodal else None)


def config_digest_source(model: SharedModel) -> str:
    """Canonical JSON of the numerics-bearing config, for the manifest: paths, versions and dtype left out."""
    config = model.hf.config.to_dict()
    ignored = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}
    # Trainers fill these in: ids that end samples or pad rows, and the attention, which the manifest names by itself.
    ignored |= {"bos_token_id", "eos_token_id", "pad_token_id", "attn_implementation"}
    kept = _without(config, ignored)
    return json.dumps(kept, sort_keys=True, default=str)


def _without(fields: Mapping[str, Any], ignored: set[str]) -> dict[str, Any]:
    """Also within the configs of a multimodal model's parts."""
    return {
        k: _without(v, ignored) if k.endswith("_config") and isinstance(v, Mapping) else v
        for k, v in fields.items()
        if k not in ignored and not k.startswith("_")
    }
