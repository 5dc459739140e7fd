"""Case F3: every name is a parameter, a comparison, or refused. Nothing is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout.errors import WeightUpdateError
from rollout.model import SharedModel
from rollout.types import TensorChunk, WeightState, WeightUpdate
from rollout.weight_names import Meaning, NameRules
from rollout.weight_stage import WeightStage
from rollout.weights import model_digest
from tests.engines import fresh_model, torch_threads
from tests.rollout.updates import chunks_of, digest_over

LAYER = "model.layers.0."
PARAMETERS = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(f"{LAYER}self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
    f"{LAYER}mlp.gate_proj.weight",
    f"{LAYER}mlp.up_proj.weight",
]
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


def rules(*, tied: bool = True) -> NameRules:
    names = PARAMETERS if tied else [*PARAMETERS, "lm_head.weight"]
    return NameRules(names, buffers=["model.rotary_emb.inv_freq"], tied_to="model.embed_tokens.weight" if tied else "")


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_canonical_name_is_itself(name: str) -> None:
    assert rules().meaning(name) == Meaning(parameters=(name,))


@pytest.mark.parametrize(
    "sent",
    [
        "norm.weight",
        "model.model.norm.weight",
        "module.model.norm.weight",
        "_orig_mod.model.norm.weight",
        "module._orig_mod.model.norm.weight",
        "_fsdp_wrapped_module.model._fsdp_wrapped_module.norm.weight",
        "model._checkpoint_wrapped_module.norm.weight",
        "module.norm.weight",
    ],
)
def test_prefixes_and_wrappers(sent: str) -> None:
    assert rules().meaning(sent) == Meaning(parameters=(NORM,))


@pytest.mark.parametrize(
    ("sent", "parts"),
    [
        ("self_attn.qkv_proj.weight", [f"self_attn.{p}_proj.weight" for p in "qkv"]),
        ("self_attn.qkv_proj.bias", [f"self_attn.{p}_proj.bias" for p in "qkv"]),
        ("mlp.gate_up_proj.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
    ],
)
@pytest.mark.parametrize("prefix", [LAYER, "layers.0.", "module.model.layers.0."])
def test_fused_projections_are_their_parts_in_order(sent: str, parts: list[str], prefix: str) -> None:
    assert rules().meaning(prefix + sent) == Meaning(parameters=tuple(LAYER + part for part in parts))


@pytest.mark.parametrize("sent", ["lm_head.weight", "model.lm_head.weight", "module.lm_head.weight"])
def test_heads(sent: str) -> None:
    tied = rules().meaning(sent)
    assert (tied.same_as, tied.parameters, tied.claim) == ("model.embed_tokens.weight", (), "lm_head.weight")
    assert rules(tied=False).meaning(sent) == Meaning(parameters=("lm_head.weight",))


@pytest.mark.parametrize(
    "sent", ["model.rotary_emb.inv_freq", "rotary_emb.inv_freq", f"{LAYER}self_attn.rotary_emb.inv_freq"]
)
def test_buffers_are_compared(sent: str) -> None:
    meaning = rules().meaning(sent)
    assert (meaning.buffer, meaning.parameters) == ("model.rotary_emb.inv_freq", ())


@pytest.mark.parametrize(
    "sent",
    [
        "model.norm.wieght",
        "",
        ".",
        "model.",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.layers.00.self_attn.rotary_emb.inv_freq",
        "model.model.model.norm.weight",
        "model.layers.0.mlp.gate_up_proj.bias",
        "model.layers.0.self_attn.query_key_value.weight",
        "base_model.model.model.norm.weight",
        "model.norm.weight.module",
        "model.rotary_emb.cos_cached",
    ],
)
def test_anything_else_is_refused(sent: str) -> None:
    with pytest.raises(WeightUpdateError, match="no parameter") as caught:
        rules().meaning(sent)
    assert caught.value.field == sent


def test_a_typo_is_answered_with_the_likely_name() -> None:
    with pytest.raises(WeightUpdateError, match=f"did you mean '{NORM}'"):
        rules().meaning("model.norm.wieght")


def test_the_refusal_of_a_huge_name_is_short() -> None:
    with pytest.raises(WeightUpdateError) as caught:
        rules().meaning("x" * 100_000)
    assert len(caught.value.message) < 500 and len(caught.value.field) <= 200


# ---- on a model: the names reach the bytes ----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tiny_qwen3_path: Path, tiny_llama_path: Path) -> SharedModel:
    return fresh_model(tiny_qwen3_path if request.param == "tied" else tiny_llama_path, torch.bfloat16)


def scaled(model: SharedModel) -> Tensors:
    return {n: (p.detach() * 1.25).clone() for n, p in model.parameters()}


def staged(model: SharedModel, sent: Tensors, *, size: int = 1000) -> WeightStage:
    stage = WeightStage(model, WeightUpdate(1, digest_over(sent), len(sent)), WeightState(0, ""))
    for chunk in chunks_of(sent, size):
        stage.add(chunk)
    return stage


def fused(tensors: Tensors) -> Tensors:
    """The same set with fused projections, under an FSDP and a compile wrapper."""
    sent: Tensors = {}
    for name, tensor in tensors.items():
        for part, whole, parts in (
            (".q_proj.", ".qkv_proj.", (".q_proj.", ".k_proj.", ".v_proj.")),
            (".gate_proj.", ".gate_up_proj.", (".gate_proj.", ".up_proj.")),
        ):
            if part in name:
                rows = [tensors[name.replace(part, p)] for p in parts]
                sent[f"_orig_mod.{name.replace(part, whole)}"] = torch.cat(rows)
        if not any(p in name for p in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            sent[f"module.{name}"] = tensor
    return sent


def test_fused_and_wrapped_names_give_the_same_model(model: SharedModel) -> None:
    tensors = scaled(model)
    sent = fused(tensors)
    assert len(sent) < len(tensors), "control: something was fused"
    stage = staged(model, sent)
    stage.verify()
    assert stage.commit().digest == digest_over(tensors) == model_digest(model) != digest_over(sent)
    for name, parameter in model.parameters():
        assert torch.equal(parameter.detach(), tensors[name]), name


def test_a_part_beside_its_fused_whole_is_a_double(model: SharedModel) -> None:
    tensors = scaled(model)
    up = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(
        WeightUpdateError, match=f"{up} arrived twice: as '_orig_mod.*gate_up_proj.weight' and as '{up}'"
    ):
        staged(model, fused(tensors) | {up: tensors[up]})


def test_a_fused_whole_of_another_height_is_refused(model: SharedModel) -> None:
    sent = fused(scaled(model))
    name = next(n for n in sent if "qkv_proj" in n)
    with pytest.raises(WeightUpdateError, match="arrived as bfloat16"):
        staged(model, sent | {name: sent[name][:-1].clone()})


def test_fused_parts_in_another_order_are_other_bytes(model: SharedModel) -> None:
    """What no rule can see, since the shapes fit: the model then differs from the trainer's, and its digest says so."""
    tensors = scaled(model)
    sent = fused(tensors)
    name = next(n for n in sent if "gate_up_proj" in n)
    sent[name] = torch.cat(sent[name].chunk(2)[::-1])
    stage = staged(model, sent)
    stage.verify()
    assert stage.commit().digest != digest_over(tensors)


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"])
def test_a_buffer_may_come_and_must_be_the_models_own(model: SharedModel, name: str) -> None:
    tensors = scaled(model)
    own = dict(model.hf.named_buffers())["model.rotary_emb.inv_freq"]
    stage = staged(model, tensors | {name: own.clone()})
    stage.verify()
    assert stage.commit().digest == digest_over(tensors)
    stage = staged(model, tensors | {name: own * 2})
    with pytest.raises(WeightUpdateError, match=r"follows from the config, .* but arrived with other bytes"):
        stage.verify()
    with pytest.raises(WeightUpdateError, match="arrived as bfloat16"):
        staged(model, tensors | {name: own.bfloat16()})


def test_a_name_twice_in_two_spellings(model: SharedModel) -> None:
    tensors = scaled(model)
    with pytest.raises(WeightUpdateError, match=f"{NORM} arrived twice: as '{NORM}' and as 'norm.weight'"):
        staged(model, tensors | {"norm.weight": tensors[NORM]})


def test_a_scalar_chunk_of_no_bytes_is_not_a_tensor(model: SharedModel) -> None:
    tensors = scaled(model)
    stage = WeightStage(model, WeightUpdate(1, digest_over(tensors), len(tensors)), WeightState(0, ""))
    stage.add(TensorChunk(NORM, "bfloat16", (64,), 0, b""))
    for name, tensor in tensors.items():
        if name != NORM:
            for chunk in chunks_of({name: tensor}):
                stage.add(chunk)
    with pytest.raises(WeightUpdateError, match="0 of 128 bytes arrived"):
        stage.verify()
