"""Faults in the weights that the trainer holds."""

from __future__ import annotations

import numpy as np
import torch

from tests.engines import random_prompt
from tests.explain.bench import Bench, fault
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause

WEIGHTS = Cause.WEIGHTS
DOWN = "model.layers.1.mlp.down_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


def weight(bench: Bench, name: str) -> torch.Tensor:
    return dict(bench.trainer.hf.named_parameters())[name].detach()


def nudge(tensor: torch.Tensor, by: float, seed: int = 0) -> None:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    tensor.add_((by * tensor.float().std() * noise).to(tensor.dtype))


@fault("one stale tensor", WEIGHTS, DOWN, "stale")
def _(bench: Bench) -> Case:
    nudge(weight(bench, DOWN), 1e-3)
    return bench.case()


@fault("every tensor one step behind", WEIGHTS, "all tensors", "stale", "llama-bf16")
def _(bench: Bench) -> Case:
    for i, parameter in enumerate(bench.trainer.hf.parameters()):
        nudge(parameter.detach(), 2e-2, i)
    return bench.case()


@fault("one tensor cast through bfloat16", WEIGHTS, Q, "cast", words="bfloat16")
def _(bench: Bench) -> Case:
    tensor = weight(bench, Q)
    tensor.copy_(tensor.bfloat16())
    return bench.case()


@fault("all tensors cast through bfloat16", WEIGHTS, "all tensors", "cast", "llama-fp32")
def _(bench: Bench) -> Case:
    for parameter in bench.trainer.hf.parameters():
        parameter.detach().copy_(parameter.detach().bfloat16())
    return bench.case()


@fault("one tensor cast through float16", WEIGHTS, DOWN, "cast", words="float16")
def _(bench: Bench) -> Case:
    tensor = weight(bench, DOWN)
    tensor.copy_(tensor.half())
    return bench.case()


@fault("the rollout's tensor cast through bfloat16", WEIGHTS, Q, "cast", words="rollout")
def _(bench: Bench) -> Case:
    model = bench.own_rollout()
    tensor = dict(model.hf.named_parameters())[Q].detach()
    tensor.copy_(tensor.bfloat16())
    return bench.case(bench.record(engine=bench.spoiled_engine()))


@fault("one unit in the last place of one element", WEIGHTS, DOWN, "corrupt", "qwen3-bf16")
def _(bench: Bench) -> Case:
    flat = weight(bench, DOWN).view(-1)
    flat.view(torch.int16)[torch.arange(0, 4)] += 64
    return bench.case()


@fault("query heads in another order", WEIGHTS, Q, "permuted", words="rows in another order")
def _(bench: Bench) -> Case:
    tensor = weight(bench, Q)
    tensor.copy_(tensor.view(4, 16, -1)[[0, 2, 1, 3]].reshape(tensor.shape))
    return bench.case()


@fault("a square matrix transposed", WEIGHTS, "layers.1.self_attn.o_proj", "permuted", words="transposed")
def _(bench: Bench) -> Case:
    tensor = weight(bench, "model.layers.1.self_attn.o_proj.weight")
    tensor.copy_(tensor.T.clone())
    return bench.case()


@fault("tied head missing", WEIGHTS, "lm_head.weight", "tied head")
def _(bench: Bench) -> Case:
    head = bench.trainer.hf.lm_head
    noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1))
    head.weight = torch.nn.Parameter(head.weight.detach() + 0.01 * noise, requires_grad=False)
    return bench.case()


@fault("gate and up swapped", WEIGHTS, "gate_proj.*up_proj", "swapped", "llama-fp32")
def _(bench: Bench) -> Case:
    gate, up = (weight(bench, f"model.layers.0.mlp.{n}_proj.weight") for n in ("gate", "up"))
    kept = gate.clone()
    gate.copy_(up)
    up.copy_(kept)
    return bench.case()


@fault("a norm's weight never loaded", WEIGHTS, "layers.1.input_layernorm", "not loaded")
def _(bench: Bench) -> Case:
    weight(bench, "model.layers.1.input_layernorm.weight").fill_(1.0)
    return bench.case()


@fault("vocabulary rows moved by one", WEIGHTS, "embed_tokens", "permuted", "llama-fp32", words="moved by")
def _(bench: Bench) -> Case:
    tensor = weight(bench, "model.embed_tokens.weight")
    tensor.copy_(tensor.roll(1, 0))
    return bench.case()


@fault("a bias never loaded", WEIGHTS, "k_proj.bias", "not loaded", "qwen2-fp32")
def _(bench: Bench) -> Case:
    weight(bench, "model.layers.0.self_attn.k_proj.bias").zero_()
    weight(bench, "model.layers.0.self_attn.q_proj.bias")
    return bench.case(values=bench.score(bench.record()))


@fault("two layers in each other's place", WEIGHTS, r"layers\.0, model\.layers\.1", "swapped", words="whole layers")
def _(bench: Bench) -> Case:
    one, two = (dict(layer.named_parameters()) for layer in bench.trainer.hf.get_decoder().layers[:2])
    for name, parameter in one.items():
        kept = parameter.detach().clone()
        parameter.detach().copy_(two[name].detach())
        two[name].detach().copy_(kept)
    return bench.case()


@fault("the head is a stale copy of the embedding", WEIGHTS, "lm_head.weight", "tied head", words="stale copy")
def _(bench: Bench) -> Case:
    head = bench.trainer.hf.lm_head
    noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1))
    head.weight = torch.nn.Parameter(head.weight.detach() * (1 + 1e-3 * noise), requires_grad=False)
    return bench.case()


@fault("a norm kept as weight - 1", WEIGHTS, "layers.0.input_layernorm", "offset", words="plus -1")
def _(bench: Bench) -> Case:
    weight(bench, "model.layers.0.input_layernorm.weight").sub_(1.0)
    return bench.case()


@fault("a tensor scaled", WEIGHTS, DOWN, "scaled", words="times 0.5")
def _(bench: Bench) -> Case:
    weight(bench, DOWN).mul_(0.5)
    return bench.case()


@fault("one tensor through float8", WEIGHTS, DOWN, "cast", words="float8_e4m3fn")
def _(bench: Bench) -> Case:
    tensor = weight(bench, DOWN)
    tensor.copy_(tensor.to(torch.float8_e4m3fn).to(tensor.dtype))
    return bench.case()


@fault("one tensor quantised to 8 bits", WEIGHTS, DOWN, "quantised", words="8 bits")
def _(bench: Bench) -> Case:
    tensor = weight(bench, DOWN)
    step = tensor.abs().max() / 127
    tensor.copy_((tensor / step).round() * step)
    return bench.case()


@fault("half of a tensor never loaded", WEIGHTS, DOWN, "not loaded", words="32 of 64 rows.*never loaded")
def _(bench: Bench) -> Case:
    weight(bench, DOWN)[32:].zero_()
    return bench.case()


@fault("a few rows of the embedding stale", WEIGHTS, "embed_tokens", "partial", "llama-fp32", words="2 of 64 rows")
def _(bench: Bench) -> Case:
    table = weight(bench, "model.embed_tokens.weight")
    for token in random_prompt(2, 5, bench.vocab):  # of the prompt, so that they are read
        nudge(table[token], 1e-2, token)
    return bench.case()


@fault("query rows in the order of another format", WEIGHTS, Q, "permuted", words="rows in another order")
def _(bench: Bench) -> Case:
    tensor = weight(bench, Q)
    pairs = tensor.view(4, 2, 8, -1).transpose(1, 2).reshape(tensor.shape)
    tensor.copy_(pairs.clone())
    return bench.case()


@fault("a matrix read in the wrong layout", WEIGHTS, DOWN, "permuted", words="transposed and given the old shape")
def _(bench: Bench) -> Case:
    tensor = weight(bench, DOWN)
    tensor.copy_(tensor.T.reshape(tensor.shape).clone())
    return bench.case()


@fault("keys and values exchanged", WEIGHTS, "k_proj.*v_proj", "swapped", "llama-bf16")
def _(bench: Bench) -> Case:
    k, v = (weight(bench, f"model.layers.1.self_attn.{n}_proj.weight") for n in ("k", "v"))
    kept = k.clone()
    k.copy_(v)
    v.copy_(kept)
    return bench.case()


@fault("NaN in a tensor", WEIGHTS, DOWN, "not finite", words="NaN")
def _(bench: Bench) -> Case:
    record = bench.record()
    values = bench.score(record)
    weight(bench, DOWN)[0, 0] = float("nan")
    return bench.case(record, np.nextafter(values, np.float32(-9)))
