"""Faults in the weights that the trainer holds."""

from __future__ import annotations

import torch

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
