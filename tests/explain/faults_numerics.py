"""Faults in the arithmetic: modules and kernels of one side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollout.kernels.base import Product
from rollout.kernels.cpu.kernel_set import CpuKernelSet
from rollout.model import SharedModel
from rollout.oracle import attend
from tests.engines import random_prompt
from tests.explain.bench import Bench, fault
from trainer_bridge.demo.sabotage import SdpaKernels
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause

NUMERICS = Cause.NUMERICS
WRONG, OTHER, SHAKY = "wrong value", "other kernel", "not invariant"


def layers(model: SharedModel) -> Any:
    return model.hf.get_decoder().layers


def patch(module: Any, build: Callable[[Any], Any]) -> None:
    module.forward = build(module.forward)


class DenseKernels(CpuKernelSet):
    """The CPU set with a plain torch attention, wrong or other in a stated way."""

    def __init__(self, page: int, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__(page)
        self._attention = attention

    def attention_varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        softmax_scale: float,
        causal: bool = True,
    ) -> torch.Tensor:
        lengths = torch.diff(cu_seqlens_q).tolist()
        outs = []
        for one in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            query, key, value = (x.transpose(0, 1).float() for x in one)
            outs.append(self._attention(query, key, value, softmax_scale, len(lengths)).transpose(0, 1).to(q.dtype))
        return torch.cat(outs)


def split_keys(splits: int) -> Callable[..., torch.Tensor]:
    """Flash decoding: keys in parts, merged by their log-sums."""

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, batch: int, parts: int = splits
    ) -> torch.Tensor:
        group = q.size(0) // k.size(0)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        future = torch.ones(q.size(1), k.size(1), dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(future, -1e30)
        lse, outs = [], []
        for s, value in zip(scores.tensor_split(parts, 2), v.tensor_split(parts, 1), strict=True):
            lse.append(s.logsumexp(2))
            outs.append(torch.softmax(s, 2) @ value)
        weights = torch.softmax(torch.stack(lse), 0)
        return (weights[..., None] * torch.stack(outs)).sum(0)

    return attention


def dense(bench: Bench, **options: Any) -> Case:
    bench.trainer.kernels = DenseKernels(bench.page, lambda q, k, v, scale, _: attend(q, k, v, scale, **options))
    return bench.case()


def tiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, _: int) -> torch.Tensor:
    group = q.size(0) // k.size(0)
    return attend(q, k.repeat(group, 1, 1), v.repeat(group, 1, 1), scale)


# ---- norms ------------------------------------------------------------------------------------------------------


@fault("one norm's eps", NUMERICS, r"layers\.1\.input_layernorm", WRONG, words="eps 1e-05")
def _(bench: Bench) -> Case:
    layers(bench.trainer)[1].input_layernorm.variance_epsilon = 1e-5
    return bench.case()


@fault(
    "one norm's eps, in bfloat16", NUMERICS, r"layers\.1\.post_attention_layernorm", WRONG, "llama-bf16", "eps 0.001"
)
def _(bench: Bench) -> Case:
    layers(bench.trainer)[1].post_attention_layernorm.variance_epsilon = 1e-3
    return bench.case()


@fault("the last norm's eps", NUMERICS, "^norm$", WRONG, words="eps 1e-05")
def _(bench: Bench) -> Case:
    bench.trainer.hf.model.norm.variance_epsilon = 1e-5
    return bench.case()


@fault("q norm dropped", NUMERICS, r"layers\.1\.q_norm", WRONG, words="norm left out")
def _(bench: Bench) -> Case:
    layers(bench.trainer)[1].self_attn.q_norm.forward = lambda x: x
    return bench.case()


@fault("k norm dropped, in bfloat16", NUMERICS, r"layers\.0\.k_norm", WRONG, "qwen3-bf16", "norm left out")
def _(bench: Bench) -> Case:
    layers(bench.trainer)[0].self_attn.k_norm.forward = lambda x: x
    return bench.case()


@fault("k norm not in the trainer's model", Cause.WEIGHTS, "k_norm", "missing")
def _(bench: Bench) -> Case:
    layers(bench.trainer)[1].self_attn.k_norm = torch.nn.Identity()
    return bench.case()


@fault("fused add_rms_norm: one rounding less", NUMERICS, r"layers\.0\.post_attention_layernorm", OTHER, "qwen3-bf16")
def _(bench: Bench) -> Case:
    norm = layers(bench.trainer)[0].post_attention_layernorm

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return (scaled * norm.weight.float()).to(x.dtype)

    norm.forward = forward
    return bench.case()


# ---- rotation ---------------------------------------------------------------------------------------------------


@fault("RoPE theta", NUMERICS, r"rope\.", WRONG, words="theta 1e\\+06 instead of 10000")
def _(bench: Bench) -> Case:
    rotary = bench.trainer.hf.model.rotary_emb
    half = rotary.inv_freq.numel()
    rotary.inv_freq.copy_(1e6 ** (-torch.arange(half, dtype=torch.float64) / half))
    return bench.case()


@fault("RoPE table in bfloat16", NUMERICS, r"rope\.", WRONG, words="table rounded to bfloat16")
def _(bench: Bench) -> Case:
    patch(
        bench.trainer.hf.model.rotary_emb,
        lambda f: lambda *a, **k: tuple(x.bfloat16().to(x.dtype) for x in f(*a, **k)),
    )
    return bench.case()


@fault("RoPE scaled linearly", NUMERICS, r"rope\.", WRONG, "llama-fp32", words="divided by 2")
def _(bench: Bench) -> Case:
    bench.trainer.hf.model.rotary_emb.inv_freq.div_(2)
    return bench.case()


# ---- attention --------------------------------------------------------------------------------------------------


@fault("query heads paired in turn (GQA order)", NUMERICS, r"layers\.0\.attention", WRONG, words="in turn")
def _(bench: Bench) -> Case:
    bench.trainer.kernels = DenseKernels(bench.page, tiled)
    return bench.case()


@fault("causal mask off by one", NUMERICS, r"layers\.0\.attention", WRONG, words="one key too many")
def _(bench: Bench) -> Case:
    return dense(bench, shift=1)


@fault("no causal mask", NUMERICS, r"layers\.0\.attention", WRONG, "llama-bf16", "no causal mask")
def _(bench: Bench) -> Case:
    return dense(bench, shift=1 << 30)


@fault("sliding window on one side only", NUMERICS, r"layers\.0\.attention", WRONG, words="window of 8")
def _(bench: Bench) -> Case:
    return dense(bench, window=8)


@fault("attention without its scale", NUMERICS, r"layers\.0\.attention", WRONG, "qwen3-fp32", "no scale")
def _(bench: Bench) -> Case:
    bench.trainer.kernels = DenseKernels(bench.page, lambda q, k, v, scale, _: attend(q, k, v, 1.0))
    return bench.case()


@fault("SDPA instead of flash attention", NUMERICS, r"layers\.0\.attention", OTHER, words="manifests say so")
def _(bench: Bench) -> Case:
    bench.trainer.kernels = SdpaKernels(bench.page)
    return bench.case()


@fault("SDPA instead of flash attention, in bfloat16", NUMERICS, r"layers\.[01]\.attention", OTHER, "llama-bf16")
def _(bench: Bench) -> Case:
    bench.trainer.kernels = SdpaKernels(bench.page)
    return bench.case()


@fault("keys in blocks of another page size", NUMERICS, r"layers\.0\.attention", OTHER, words="page_size|attention")
def _(bench: Bench) -> Case:
    bench.trainer.kernels = CpuKernelSet(32)
    return bench.case()


@fault("num_splits = 2", NUMERICS, r"layers\.0\.attention", OTHER)
def _(bench: Bench) -> Case:
    bench.trainer.kernels = DenseKernels(bench.page, split_keys(2))
    return bench.case()


@fault("num_splits chosen by the batch", NUMERICS, r"layers\.0\.attention", SHAKY, words="trainer")
def _(bench: Bench) -> Case:
    split = split_keys(1)
    bench.trainer.kernels = DenseKernels(
        bench.page, lambda q, k, v, s, batch: split(q, k, v, s, batch, parts=1 if batch > 1 else 2)
    )
    return bench.case()


@fault("probabilities rounded before PV", NUMERICS, r"layers\.0\.attention", OTHER, "llama-bf16")
def _(bench: Bench) -> Case:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, _: int) -> torch.Tensor:
        group = q.size(0) // k.size(0)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        future = torch.ones(q.size(1), k.size(1), dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(future, -torch.inf)
        return torch.softmax(scores, -1).bfloat16().float() @ v

    bench.trainer.kernels = DenseKernels(bench.page, attention)
    return bench.case()


# ---- products, activations, head --------------------------------------------------------------------------------


def few_rows_split(forward: Any, weight: torch.Tensor) -> Any:
    """Below 24 rows the sum is split in two: what an unpadded product does where few rows take another kernel."""

    def run(x: torch.Tensor) -> torch.Tensor:
        if x[..., 0].numel() >= 24:
            return forward(x)  # type: ignore[no-any-return]
        half, wide, w = x.size(-1) // 2, x.float(), weight.float()
        return (wide[..., :half] @ w[:, :half].T + wide[..., half:] @ w[:, half:].T).to(x.dtype)

    return run


@fault("unpadded product at few rows, trainer", NUMERICS, r"layers\.1\.o_proj", SHAKY, words="trainer")
def _(bench: Bench) -> Case:
    # In every layer but the first: in bfloat16 one product alone may round alike at every token of a short sample.
    for layer in layers(bench.trainer)[1:]:
        module = layer.self_attn.o_proj
        patch(module, functools.partial(few_rows_split, weight=module.weight))
    return bench.case(bench.record(random_prompt(9, 3)))


@fault("unpadded product at few rows, rollout", NUMERICS, r"layers\.0\.down_proj", SHAKY, words="rollout")
def _(bench: Bench) -> Case:
    module = layers(bench.own_rollout())[0].mlp.down_proj
    patch(module, lambda f: few_rows_split(f, module.weight))
    return bench.case(bench.record(random_prompt(30, 3), engine=bench.spoiled_engine()))


@fault("a product that depends on its company only", NUMERICS, r"layers\.1\.up_proj", SHAKY, words="trainer")
def _(bench: Bench) -> Case:
    module = layers(bench.trainer)[1].mlp.up_proj

    def build(forward: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            # Alone the sample has 32 rows and takes the right path; in its micro-batch it did not.
            out = forward(x)
            return out if x.size(1) <= 32 else out * (1 + 2.0**-20)

        return run

    patch(module, build)
    record = bench.record()
    company = (random_prompt(40, 8),)
    values = bench.score(record, company=company)
    return bench.case(record, values, trainer_company=company)


@fault("a product in float64 on one side", NUMERICS, r"layers\.1\.down_proj", OTHER)
def _(bench: Bench) -> Case:
    module = layers(bench.trainer)[1].mlp.down_proj
    module.forward = lambda x: (x.double() @ module.weight.double().T).to(x.dtype)
    return bench.case()


@fault("a product in TF32-like precision", NUMERICS, r"layers\.0\.k_proj", WRONG, words="bfloat16")
def _(bench: Bench) -> Case:
    module = layers(bench.trainer)[0].self_attn.k_proj
    module.forward = lambda x: (x.bfloat16().double() @ module.weight.bfloat16().double().T).to(x.dtype)
    return bench.case()


@fault("the bias left out", NUMERICS, r"layers\.1\.q_proj", WRONG, "qwen2-fp32", words="bias left out")
def _(bench: Bench) -> Case:
    module = layers(bench.trainer)[1].self_attn.q_proj
    module.forward = lambda x: torch.nn.functional.linear(x, module.weight)
    return bench.case()


@fault("GELU instead of SiLU", NUMERICS, r"layers\.0\.act", WRONG, words="GELU instead")
def _(bench: Bench) -> Case:
    for layer in layers(bench.trainer):
        layer.mlp.act_fn.forward = torch.nn.functional.gelu
    return bench.case()


@fault("SiLU by another formula", NUMERICS, r"layers\.0\.act", OTHER)
def _(bench: Bench) -> Case:
    for layer in layers(bench.trainer):
        layer.mlp.act_fn.forward = lambda x: x * (0.5 * (1 + torch.tanh(0.5 * x)))
    return bench.case()


@fault("logits capped", NUMERICS, "logits", WRONG, words="capped at 30")
def _(bench: Bench) -> Case:
    patch(bench.trainer.hf.lm_head, lambda f: lambda x: 30 * torch.tanh(f(x) / 30))
    return bench.case()


@fault("the head in float32 on one side", NUMERICS, "logits", OTHER, "qwen3-bf16")
def _(bench: Bench) -> Case:
    head = bench.trainer.hf.lm_head
    head.forward = lambda x: x.float() @ head.weight.float().T
    return bench.case()


@fault("embeddings scaled", NUMERICS, "embed", WRONG, words="scaled by the root")
def _(bench: Bench) -> Case:
    patch(bench.trainer.hf.model.embed_tokens, lambda f: lambda x: f(x) * 8.0)
    return bench.case()


@fault("a residual connection left out", NUMERICS, r"layers\.1\.(output|attn_residual)", WRONG)
def _(bench: Bench) -> Case:
    layer = layers(bench.trainer)[1]
    patch(layer, lambda f: lambda x, *a, **k: f(x, *a, **k) - x)
    return bench.case()


@fault("the rollout's fused forward is off", NUMERICS, "norm", "fused forward", words="fused")
def _(bench: Bench) -> Case:
    inner = bench.decoder
    assert inner is not None

    class Off:
        """A decoder whose last norm is one part in 2^20 too large."""

        def hidden_states(self, *args: Any) -> torch.Tensor:
            return inner.hidden_states(*args) * (1 + 2.0**-20)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return inner.logits(hidden)

        def refresh(self) -> None:
            inner.refresh()

        def products(self) -> Sequence[Product]:
            return inner.products()

    bench.decoder = Off()
    from tests.engines import build_engine

    engine = build_engine(bench.rollout, kv_tokens=2048)
    engine._decoder = bench.decoder
    return bench.case(bench.record(engine=engine))
