"""The shared model definition: what is refused, by name, and what a folder is read for (A6)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from rollout.errors import InvalidRequest, NotFound, UnsupportedFeature
from rollout.kernels.registry import resolve_kernels
from rollout.model import check_supported, config_digest_source, load_model, required_features
from tests.engines import fresh_model, isolated, sample, shared_model, torch_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
# What names the refusal: feature, architecture, config class and its fields.
REFUSED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("sliding_window", "MistralForCausalLM", "MistralConfig", {"sliding_window": 8}),
    ("sliding_window", "Qwen2ForCausalLM", "Qwen2Config", {"use_sliding_window": True, "sliding_window": 8}),
    ("sliding_window", "Qwen3ForCausalLM", "Qwen3Config", {"layer_types": ["full_attention", "sliding_attention"]}),
    (
        "softcap",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"attn_logit_softcapping": 50.0, "layer_types": ["full_attention"] * 2},
    ),
    ("moe", "MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    ("moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"num_experts": 4}),
    ("mla", "DeepseekV3ForCausalLM", "DeepseekV3Config", {"kv_lora_rank": 16, "num_experts": None}),
    ("linear_attention", "Qwen3NextForCausalLM", "Qwen3NextConfig", {}),
    (
        "attention_sinks",
        "GptOssForCausalLM",
        "GptOssConfig",
        {"layer_types": ["full_attention"] * 2, "num_local_experts": 0},
    ),
    ("alibi", "LlamaForCausalLM", "LlamaConfig", {"alibi": True}),
    ("fp8", "LlamaForCausalLM", "LlamaConfig", {"quantization_config": {"quant_method": "fp8"}}),
    ("fp8", "LlamaForCausalLM", "LlamaConfig", {"quantization_config": {"quant_method": "awq", "bits": 4}}),
]


def config(kind: str, architecture: str, fields: dict[str, Any]) -> PretrainedConfig:
    build: Any = getattr(transformers, kind)
    result: PretrainedConfig = build(**(SMALL | fields))
    result.architectures = [architecture]
    return result


@pytest.mark.parametrize(("feature", "architecture", "kind", "fields"), REFUSED)
def test_features_are_refused_by_name(feature: str, architecture: str, kind: str, fields: dict[str, Any]) -> None:
    wanted = config(kind, architecture, fields)
    assert feature in [name for name, _ in required_features(wanted)]
    field = dict(required_features(wanted))[feature]
    with pytest.raises(UnsupportedFeature) as caught:
        check_supported(wanted, resolve_kernels(), torch.bfloat16)
    assert architecture in caught.value.message and "'cpu'" in caught.value.message
    if len(required_features(wanted)) == 1:
        assert f"needs {feature} " in caught.value.message and field in caught.value.message


@pytest.mark.parametrize(
    ("kind", "architecture", "fields"),
    [
        ("LlamaConfig", "LlamaForCausalLM", {}),
        ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2Config", "Qwen2ForCausalLM", {"sliding_window": 4096, "use_sliding_window": False}),
        ("Qwen3Config", "Qwen3ForCausalLM", {}),
    ],
)
def test_supported_configs_pass(kind: str, architecture: str, fields: dict[str, Any]) -> None:
    check_supported(config(kind, architecture, fields), resolve_kernels(), torch.bfloat16)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_types_that_look_at_strangers_are_refused(kind: str) -> None:
    wanted = config("LlamaConfig", "LlamaForCausalLM", {})
    wanted.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedFeature, match=f"'{kind}' depends on the other sequences"):
        check_supported(wanted, resolve_kernels(), torch.bfloat16)
    wanted.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    check_supported(wanted, resolve_kernels(), torch.bfloat16)


def test_architectures_dtypes_and_heads_off_the_list_are_refused() -> None:
    with pytest.raises(UnsupportedFeature, match=r"architecture GPTNeoXForCausalLM.*supported: .*LlamaForCausalLM"):
        check_supported(config("GPTNeoXConfig", "GPTNeoXForCausalLM", {}), resolve_kernels(), torch.bfloat16)
    llama = config("LlamaConfig", "LlamaForCausalLM", {})
    with pytest.raises(UnsupportedFeature, match="float16"):
        check_supported(llama, resolve_kernels(), torch.float16)
    llama.head_dim = 512
    with pytest.raises(UnsupportedFeature, match="512 exceeds 256"):
        check_supported(llama, resolve_kernels(), torch.bfloat16)


def test_a_refused_folder_is_not_loaded(tiny_llama_path: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama_path, tmp_path / "m")
    fields = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(fields | {"sliding_window": 16}))
    (tmp_path / "m" / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedFeature, match="sliding_window"):
        fresh_model(tmp_path / "m", torch.float32)


def test_folders_and_context(tiny_llama_path: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no config\.json"):
        fresh_model(tmp_path, torch.float32)
    for length in (1, 2049, 0, -1):
        with pytest.raises(InvalidRequest, match=f"{length} is outside \\[2, 2048\\]") as caught:
            fresh_model(tiny_llama_path, torch.float32, context_length=length)
        assert caught.value.field == "model.context_length"
    assert fresh_model(tiny_llama_path, torch.float32, context_length=40).spec.context_length == 40


def test_spec(tiny_qwen3_path: Path, tiny_llama_path: Path) -> None:
    qwen, llama = (shared_model(p, torch.bfloat16).spec for p in (tiny_qwen3_path, tiny_llama_path))
    assert (qwen.tied, llama.tied) == (True, False)
    for spec in (qwen, llama):
        sizes = spec.vocab_size, spec.context_length, spec.num_layers, spec.num_kv_heads, spec.head_dim
        assert sizes == (64, 2048, 2, 2, 16) and spec.dtype == torch.bfloat16 and spec.eos_token_ids == (1,)


def test_only_the_trainers_side_has_gradients(tiny_qwen3_path: Path) -> None:
    assert not any(p.requires_grad for _, p in shared_model(tiny_qwen3_path, torch.float32).parameters())
    trained = fresh_model(tiny_qwen3_path, torch.float32, trainable=True)
    assert all(p.requires_grad for _, p in trained.parameters()) and not trained.hf.training


def test_a_tied_head_is_one_parameter(tiny_qwen3_path: Path, tiny_llama_path: Path) -> None:
    names = [{n for n, _ in shared_model(p, torch.bfloat16).parameters()} for p in (tiny_qwen3_path, tiny_llama_path)]
    assert ["lm_head.weight" in n for n in names] == [False, True]


# ---- generation_config.json (A6) --------------------------------------------------------------------------------


def with_generation_config(source: Path, target: Path, **fields: Any) -> Path:
    shutil.copytree(source, target)
    (target / "generation_config.json").unlink(missing_ok=True)
    if fields:
        (target / "generation_config.json").write_text(json.dumps(fields))
    return target


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_sampling_default_is_read_from_it(tiny_qwen3_path: Path, tmp_path: Path, top_k: int) -> None:
    loud = {
        "do_sample": True,
        "top_k": 3,
        "top_p": 0.5,
        "temperature": 0.1,
        "repetition_penalty": 1.1,
        "eos_token_id": 1,
    }
    models = [
        fresh_model(with_generation_config(tiny_qwen3_path, tmp_path / "loud", **loud), torch.float32),
        fresh_model(with_generation_config(tiny_qwen3_path, tmp_path / "silent"), torch.float32),
    ]
    said = [isolated(m, sample((2, 3, 4), max_tokens=30, top_k=top_k)).bits() for m in models]
    assert said[0] == said[1]
    # Control: had top_k = 3 been read, it would show.
    assert isolated(models[1], sample((2, 3, 4), max_tokens=30, top_k=3)).bits() != said[1]


def test_eos_ids_of_both_files_count(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    folder = with_generation_config(tiny_qwen3_path, tmp_path / "m", eos_token_id=[7, 1, 9])
    assert fresh_model(folder, torch.float32).spec.eos_token_ids == (1, 7, 9)


def test_digest_source_holds_no_path(tiny_qwen3_path: Path) -> None:
    source = config_digest_source(shared_model(tiny_qwen3_path, torch.float32))
    fields = json.loads(source)
    assert fields["rms_norm_eps"] and fields["rope_parameters"] and "transformers_version" not in fields
    assert str(tiny_qwen3_path) not in source and " at 0x" not in source


def test_load_model_takes_a_string(tiny_qwen3_path: Path) -> None:
    assert (
        load_model(str(tiny_qwen3_path), dtype=torch.float32, kernels=resolve_kernels()).spec.name
        == tiny_qwen3_path.name
    )
