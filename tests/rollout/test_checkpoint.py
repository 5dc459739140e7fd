"""A checkpoint folder is read whole or refused: nothing is drawn at random, left out or overridden in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.assets import tiny_model
from rollout.errors import ConfigError, UnsupportedFeature
from tests.engines import (
    assert_three_ways_equal,
    build_engine,
    fresh_model,
    random_prompt,
    run,
    sample,
)

Tensors = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj.weight"


def with_weights(source: Path, to: Path, change: Callable[[Tensors], None]) -> Path:
    shutil.copytree(source, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def with_config(source: Path, to: Path, **fields: Any) -> Path:
    shutil.copytree(source, to)
    file = to / "config.json"
    kept = {k: v for k, v in (json.loads(file.read_text()) | fields).items() if v is not ...}
    file.write_text(json.dumps(kept))
    return to


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        fresh_model(folder, torch.float32)
    assert caught.value.field == "model.path" and str(folder) in caught.value.message
    return caught.value.message


WEIGHTS: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("a projection", lambda t: t.pop(UP), f"1 parameters are in no file: {UP}"),
    ("the head, untied", lambda t: t.pop("lm_head.weight"), "in no file: lm_head.weight"),
    ("a layer", lambda t: [t.pop(k) for k in list(t) if ".layers.1." in k], r"9 parameters .* and 4 more"),
    ("a bias without place", lambda t: t.update({f"{UP[:-6]}bias": torch.ones(96)}), r"1 tensors have no place"),
    ("a layer too many", lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[UP] + 1}), "no place .*layers.2"),
    ("scales of quantised weights", lambda t: t.update({f"{UP}_scale_inv": torch.ones(1)}), "no place .*scale_inv"),
    (
        "another width",
        lambda t: t.update({UP: torch.zeros(90, 64)}),
        r"up_proj.weight has shape \[90, 64\].*\[96, 64\]",
    ),
    (
        "a padded vocabulary",
        lambda t: t.update({"model.embed_tokens.weight": torch.zeros(72, 64)}),
        r"embed_tokens.weight has shape \[72, 64\], config.json asks for \[64, 64\]",
    ),
]


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in WEIGHTS], ids=[row[0] for row in WEIGHTS])
def test_weights_that_are_not_those_of_the_config(
    change: Callable[[Tensors], None], message: str, tiny_llama_path: Path, tmp_path: Path
) -> None:
    folder = with_weights(tiny_llama_path, tmp_path / "m", change)
    with pytest.raises(ConfigError, match=message):
        fresh_model(folder, torch.float32)
    assert "config.json" in refusal(folder)


def test_constants_that_old_checkpoints_carry_are_passed_over(tiny_llama_path: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = with_weights(tiny_llama_path, tmp_path / "m", lambda t: t.update({name: torch.ones(8)}))
    loaded, plain = (dict(fresh_model(p, torch.float32).parameters()) for p in (folder, tiny_llama_path))
    assert loaded.keys() == plain.keys() and all(torch.equal(loaded[n], plain[n]) for n in plain)


def test_a_tied_head_may_be_stored_and_must_be_the_embedding(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    def head(offset: float) -> Callable[[Tensors], None]:
        return lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + offset})

    same = fresh_model(with_weights(tiny_qwen3_path, tmp_path / "same", head(0.0)), torch.float32)
    assert same.hf.get_output_embeddings().weight is same.hf.get_input_embeddings().weight and same.spec.tied
    assert "ties lm_head to the embedding" in refusal(with_weights(tiny_qwen3_path, tmp_path / "other", head(1.0)))


def shards(folder: Path, index: dict[str, str] | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        part = {n: tensors[n] for n in names if where[n] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index or where}))


def test_shards(tiny_llama_path: Path, tmp_path: Path) -> None:
    whole = dict(fresh_model(tiny_llama_path, torch.float32).parameters())
    good, lost, both = (Path(shutil.copytree(tiny_llama_path, tmp_path / n)) for n in ("good", "lost", "both"))
    shards(good)
    parts = dict(fresh_model(good, torch.float32).parameters())
    assert all(torch.equal(parts[n], whole[n]) for n in whole)
    shards(lost)
    (lost / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(lost)
    shutil.copy(good / "model.safetensors.index.json", both)
    assert "two sets of weights" in refusal(both)


FILES: list[tuple[str, str, bytes, str]] = [
    ("a cut file", "model.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00{}", "cannot be loaded"),
    ("a pointer of Git LFS", "model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "cannot be loaded"),
    ("half a config", "config.json", b'{"model_type":', "JSONDecodeError"),
    ("a list", "config.json", b"[]", "must be a JSON object"),
    ("an empty config", "config.json", b"{}", "model_type"),
    ("bytes that are no text", "config.json", b"\xff\xfe{", "UnicodeDecodeError"),
    ("half a generation config", "generation_config.json", b"{", "generation_config.json cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "message"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_files_that_cannot_be_read(
    name: str, content: bytes, message: str, tiny_llama_path: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_llama_path, tmp_path / "m"))
    (folder / name).write_bytes(content)
    assert message in refusal(folder)


@pytest.mark.parametrize("eos", [99, -1, [1, 64]])
def test_eos_ids_that_can_never_be_sampled(eos: int | list[int], tiny_llama_path: Path, tmp_path: Path) -> None:
    assert "is outside [0, 63]" in refusal(with_config(tiny_llama_path, tmp_path / "m", eos_token_id=eos))


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | fields}


IGNORED: list[tuple[dict[str, Any], str]] = [
    (rope(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 would be ignored"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 would be ignored"),
    ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4}}}, "kinds of layers"),
    ({"rope_parameters": ..., "rope_scaling": {"factor": 4.0}, "rope_theta": 1e4}, "factor 4.0 and no rope_type"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"hidden_act": "relu"}, "hidden_act 'relu'"),
]


@pytest.mark.parametrize(("fields", "message"), IGNORED)
def test_options_that_one_side_would_ignore_are_refused(
    fields: dict[str, Any], message: str, tiny_qwen3_path: Path, tmp_path: Path
) -> None:
    """The fused forward has SiLU alone; transformers passes over the rotary ones."""
    with pytest.raises(UnsupportedFeature, match=message):
        fresh_model(with_config(tiny_qwen3_path, tmp_path / "m", **fields), torch.float32)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0, must be at least 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        (rope(rope_theta=0.0), "rope_theta = 0.0, must be above 0"),
        (rope(rope_theta=-1e4), "rope_theta = -10000.0"),
        (rope(rope_theta=float("inf")), "rope_theta = inf"),
        (rope(rope_type="linear", factor=0.0), "rope factor = 0.0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings = 0, must be at least 1"),
    ],
    ids=str,
)
def test_numbers_that_make_every_log_prob_nan(
    fields: dict[str, Any], match: str, tiny_qwen3_path: Path, tmp_path: Path
) -> None:
    """The model loaded, and the first request was told that the weights are broken."""
    assert match in refusal(with_config(tiny_qwen3_path, tmp_path / "odd", **fields))
    fresh_model(with_config(tiny_qwen3_path, tmp_path / "fine", rms_norm_eps=0.0), torch.float32)


def test_two_bases_of_the_rotary_embedding(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    message = refusal(with_config(tiny_qwen3_path, tmp_path / "two", rope_theta=777.0))
    assert "rope_theta = 777.0 and rope_parameters.rope_theta = 10000.0" in message
    fresh_model(with_config(tiny_qwen3_path, tmp_path / "one", rope_theta=10000), torch.float32)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"head_dim": 24, "hidden_act": "swish"}),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}),
        ("qwen3", {"vocab_size": 67, "rms_norm_eps": 1e-12, "num_key_value_heads": 1}),
        ("qwen3", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=512, attention_factor=1.3)),
        ("llama", rope(rope_type="linear", factor=2.0)),
        ("llama", {"rope_parameters": ..., "rope_theta": 777.0, "rope_scaling": None}),
    ],
)
def test_options_that_are_honoured_are_so_on_all_three_paths(kind: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    given = {key: value for key, value in fields.items() if value is not ...}
    # Fields of an older format are written into the file behind the model's back.
    folder = tiny_model(kind, tmp_path / "m", **({} if len(given) < len(fields) else given))
    folder = with_config(folder, tmp_path / "c", **fields)
    model = fresh_model(folder, torch.float32)
    engine = build_engine(model)
    requests = [sample(random_prompt(n, n), f"s{n}", max_tokens=6) for n in (1, 17, 40)]
    assert assert_three_ways_equal(model, requests, run(engine, requests), engine) == 18
