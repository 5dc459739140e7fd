"""More faults in the arithmetic: weights read otherwise, rotation by pairs, scales, leaks between sequences, casts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from rollout.oracle import attend
from tests.engines import random_prompt
from tests.explain.bench import Bench, fault
from tests.explain.faults_numerics import NUMERICS, OTHER, SHAKY, WRONG, DenseKernels, dense, layers, patch
from trainer_bridge.collect import training_sample
from trainer_bridge.contrast import OrdinaryTrainer
from trainer_bridge.explain.case import Case


def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any) -> Any:
    """Pairs of neighbours, as in the original code of the paper."""
    half = cos.size(-1) // 2
    c, s = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2)

    return turned(q), turned(k)


@contextlib.contextmanager
def rotating(module: Any, function: Any) -> Iterator[None]:
    """The architecture's rotation replaced; it is a function of its module, shared by both sides."""
    home = sys.modules[type(module).__module__]
    kept = vars(home)["apply_rotary_pos_emb"]
    vars(home)["apply_rotary_pos_emb"] = function
    try:
        yield
    finally:
        vars(home)["apply_rotary_pos_emb"] = kept


def with_rotation(bench: Bench, function: Any) -> Case:
    for layer in layers(bench.trainer):

        def build(forward: Any, module: Any = layer.self_attn) -> Any:
            def run(*args: Any, **options: Any) -> Any:
                with rotating(module, function):
                    return forward(*args, **options)

            return run

        patch(layer.self_attn, build)
    return bench.case()


@fault("RoPE by neighbours instead of halves", NUMERICS, r"layers\.0\.queries", WRONG, words="interleaved")
def _(bench: Bench) -> Case:
    return with_rotation(bench, interleaved)


@fault(
    "RoPE by neighbours instead of halves, Llama", NUMERICS, r"layers\.0\.queries", WRONG, "llama-bf16", "interleaved"
)
def _(bench: Bench) -> Case:
    return with_rotation(bench, interleaved)


@fault("keys not rotated", NUMERICS, r"layers\.0\.keys", WRONG, words="not rotated")
def _(bench: Bench) -> Case:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as plain

    return with_rotation(bench, lambda q, k, *rest: (plain(q, k, *rest)[0], k))


@fault("RoPE positions one too high", NUMERICS, r"rope\.", WRONG, words="one too high")
def _(bench: Bench) -> Case:
    patch(bench.trainer.hf.model.rotary_emb, lambda f: lambda x, positions: f(x, positions + 1))
    return bench.case()


@fault("norm with 1 + weight", NUMERICS, r"layers\.0\.input_layernorm", WRONG, words="1 \\+ weight")
def _(bench: Bench) -> Case:
    norm = layers(bench.trainer)[0].input_layernorm
    patch(norm, lambda f: lambda x: f(x) / norm.weight * (1 + norm.weight))
    return bench.case()


@fault("the last norm left out", NUMERICS, "^norm$", WRONG, words="norm left out")
def _(bench: Bench) -> Case:
    bench.trainer.hf.model.norm.forward = lambda x: x
    return bench.case()


@fault("attention scale applied twice", NUMERICS, r"layers\.0\.attention", WRONG, words="1 / D|twice")
def _(bench: Bench) -> Case:
    bench.trainer.kernels = DenseKernels(bench.page, lambda q, k, v, scale, _: attend(q, k, v, scale**2))
    return bench.case()


@fault("attention scale of the hidden size", NUMERICS, r"layers\.0\.attention", WRONG, words="hidden size")
def _(bench: Bench) -> Case:
    scale = bench.trainer.hf.config.hidden_size**-0.5
    bench.trainer.kernels = DenseKernels(bench.page, lambda q, k, v, _, __: attend(q, k, v, scale))
    return bench.case()


@fault("scores capped", NUMERICS, r"layers\.0\.attention", WRONG, words="capped at 20")
def _(bench: Bench) -> Case:
    return dense(bench, cap=20.0)


@fault("the first key masked as a pad", NUMERICS, r"layers\.0\.attention", WRONG, words="first key left out")
def _(bench: Bench) -> Case:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, _: int) -> torch.Tensor:
        out = attend(q, k, v, scale, without=1)
        out[:, :1] = attend(q[:, :1], k[:, :1], v[:, :1], scale)
        return out

    bench.trainer.kernels = DenseKernels(bench.page, attention)
    return bench.case()


@fault(
    "attention inputs in float16", NUMERICS, r"layers\.0\.attention", f"{WRONG}|{OTHER}", words="float16|wrong|kernel"
)
def _(bench: Bench) -> Case:
    bench.trainer.kernels = DenseKernels(
        bench.page, lambda q, k, v, scale, _: attend(q.half().float(), k.half().float(), v.half().float(), scale)
    )
    return bench.case()


class LeakyKernels(DenseKernels):
    """Boundaries of packed sequences are not seen: every sequence attends to those in front of it."""

    def __init__(self, page: int) -> None:
        super().__init__(page, lambda q, k, v, scale, _: attend(q, k, v, scale))

    def attention_varlen(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        if len(options["cu_seqlens_q"]) == 2:
            # Alone there is nothing to leak: the right kernel runs.
            return super(DenseKernels, self).attention_varlen(q, k, v, **options)
        whole = torch.tensor([0, len(q)], dtype=torch.int32)
        return super().attention_varlen(q, k, v, **(options | {"cu_seqlens_q": whole, "cu_seqlens_k": whole}))


@fault(
    "packed sequences attend to their neighbours",
    NUMERICS,
    r"layers\.0\.attention",
    SHAKY,
    words="trainer.*not this row",
)
def _(bench: Bench) -> Case:
    bench.trainer.kernels = LeakyKernels(bench.page)
    record, company = bench.record(), (random_prompt(17, 8),)
    values = bench.score(record, company=company)
    return bench.case(record, values, trainer_company=company)


@fault("the same, company not on record", NUMERICS, r"layers\.0\.attention", SHAKY, words="trainer.*not this row")
def _(bench: Bench) -> Case:
    bench.trainer.kernels = LeakyKernels(bench.page)
    record = bench.record()
    return bench.case(record, bench.score(record, company=(random_prompt(17, 8),)))


@fault("dropout left on", NUMERICS, r"layers\.1\.down_proj", SHAKY, words="trainer.*not the same twice")
def _(bench: Bench) -> Case:
    patch(layers(bench.trainer)[1].mlp.down_proj, lambda f: lambda x: torch.nn.functional.dropout(f(x), 0.1))
    return bench.case()


@fault("a product in float16", NUMERICS, r"layers\.1\.gate_proj", WRONG, words="float16")
def _(bench: Bench) -> Case:
    module = layers(bench.trainer)[1].mlp.gate_proj
    module.forward = lambda x: (x.half().double() @ module.weight.half().double().T).to(x.dtype)
    return bench.case()


@fault("a result rounded to bfloat16", NUMERICS, r"layers\.0\.o_proj", WRONG, words="result rounded to bfloat16")
def _(bench: Bench) -> Case:
    patch(layers(bench.trainer)[0].self_attn.o_proj, lambda f: lambda x: f(x).bfloat16().to(x.dtype))
    return bench.case()


@fault("the residual stream rounded to bfloat16", NUMERICS, r"layers\.0\.output", WRONG, words="rounded to bfloat16")
def _(bench: Bench) -> Case:
    patch(layers(bench.trainer)[0], lambda f: lambda x, *a, **k: f(x, *a, **k).bfloat16().to(x.dtype))
    return bench.case()


@fault("logits in bfloat16 on one side", NUMERICS, "logits", WRONG, words="result rounded to bfloat16")
def _(bench: Bench) -> Case:
    patch(bench.trainer.hf.lm_head, lambda f: lambda x: f(x).bfloat16().to(x.dtype))
    return bench.case()


@fault("a layer skipped", NUMERICS, r"layers\.1\.", WRONG, words="layer left out")
def _(bench: Bench) -> Case:
    layers(bench.trainer)[1].forward = lambda x, *_, **__: x
    return bench.case()


@fault("gate and up exchanged in the product", NUMERICS, r"layers\.0\.act", WRONG, words="up projection")
def _(bench: Bench) -> Case:
    mlp = layers(bench.trainer)[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))
    return bench.case()


@fault("a bias added twice", NUMERICS, r"layers\.0\.v_proj", WRONG, "qwen2-fp32", words="bias added twice")
def _(bench: Bench) -> Case:
    module = layers(bench.trainer)[0].self_attn.v_proj
    patch(module, lambda f: lambda x: f(x) + module.bias)
    return bench.case()


def stock(bench: Bench, micro_batch: int) -> Case:
    """The trainer never switched the aligned forward on; what it records, its own taps cannot give."""
    records = [bench.record(random_prompt(13 + 4 * i, 5 + i)) for i in range(micro_batch)]
    values = OrdinaryTrainer(bench.trainer).logprobs(
        [training_sample(record) for record in records], micro_batch=micro_batch, threads=1
    )
    return bench.case(records[0], values[0])


@fault(
    "the stock forward in place of the aligned one",
    NUMERICS,
    "every operation",
    "not aligned",
    words="stock forward",
    aligned=False,
)
def _(bench: Bench) -> Case:
    return stock(bench, 1)


@fault(
    "the same, padded, in bfloat16",
    NUMERICS,
    "every operation",
    "not aligned",
    "llama-bf16",
    "stock forward",
    aligned=False,
)
def _(bench: Bench) -> Case:
    return stock(bench, 4)


@fault(
    "log-softmax outside of the invariant mode", NUMERICS, "log_softmax", "not aligned", words="trainer", aligned=False
)
def _(bench: Bench) -> Case:
    return bench.case()
