"""Float64 values of one operation from the inputs both sides share, and of the operation with a usual fault in it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from rollout import oracle
from trainer_bridge.explain.operation import ROUNDED, Inputs, Variant, needs
from trainer_bridge.explain.reference_attention import attentions

_EPSILONS = (1e-3, 1e-5, 1e-6, 1e-8, 1e-12, 0.0)
_THETAS = (1e4, 1e5, 5e5, 1e6)


def variants(x: Inputs) -> Iterator[Variant]:
    """The right operation first, then the usual faults. Nothing for an operation that is not known."""
    right: Variant | None = None
    for variant in _named(x):
        right = right or variant
        yield variant
    if right is not None:
        for dtype in ROUNDED.get(x.dtype, ()):
            name = str(dtype).removeprefix("torch.")
            yield Variant(f"its result rounded to {name}", partial(_rounded, right=right, dtype=dtype))


def _rounded(x: Inputs, *, right: Variant, dtype: torch.dtype) -> torch.Tensor:
    return right.compute(x).to(dtype).double()


def _named(x: Inputs) -> Iterator[Variant]:
    name = x.operation
    if name in ("input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"):
        yield from _norms(x)
    elif name.endswith("_proj"):
        yield from _linears(x, name)
    elif name in ("rope.cos", "rope.sin"):
        yield from _tables(x, name)
    elif name in ("queries", "keys"):
        yield from _rotations(name)
    elif name == "attention":
        yield from attentions(x)
    elif name in ("attn_residual", "output"):
        yield from _residuals(x, name)
    elif name == "act":
        yield from _activations()
    elif name == "gated":
        yield Variant("", lambda i: (i.value("act") * i.value("up_proj"))[i.rows])
    elif name == "values":
        yield Variant("", lambda i: _heads(i.value("v_proj"), i.sizes.head_dim)[i.rows])
    elif name == "embed":
        yield from _embeddings()
    elif name == "logits":
        yield from _heads_of_model()


def _heads(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[S, H * D] or [S, H, D] -> [S, H, D]"""
    return x.reshape(len(x), -1, dim)


def _norms(x: Inputs) -> Iterator[Variant]:
    name = x.operation
    (source,) = needs(x.tap, x.layer, x.sizes.layers)
    weight = x.parameter(name)
    if weight is None:
        return

    def rows(i: Inputs) -> torch.Tensor:
        found = i.value(source)[i.rows]
        return _heads(found, i.sizes.head_dim) if name in ("q_norm", "k_norm") else found

    def norm(i: Inputs, eps: float, scale: torch.Tensor = weight, centred: bool = False) -> torch.Tensor:
        found = rows(i)
        found = found - found.mean(-1, keepdim=True) if centred else found
        # The architecture rounds before it multiplies; without that a small change of eps drowns in bfloat16.
        return oracle.rms_norm(found, torch.ones_like(weight), eps).to(i.dtype).double() * scale

    right = x.sizes.eps
    yield Variant("", lambda i: norm(i, right))
    for eps in _EPSILONS:
        if abs(eps - right) > 1e-3 * right:
            yield Variant(f"eps {eps:g} instead of {right:g}", partial(norm, eps=eps))
    yield Variant("the norm left out", rows)
    yield Variant("the norm without its weight", lambda i: norm(i, right, torch.ones_like(weight)))
    yield Variant("1 + weight", lambda i: norm(i, right, weight + 1))
    yield Variant("weight - 1", lambda i: norm(i, right, weight - 1))
    yield Variant("eps outside the root", lambda i: (rows(i) / (_root(rows(i)) + right)).to(i.dtype).double() * weight)
    yield Variant("the sum of squares in place of their mean",
                  lambda i: norm(i, right) / rows(i).size(-1) ** 0.5)  # fmt: skip
    yield Variant("LayerNorm instead of RMSNorm", lambda i: norm(i, right, weight, True))


def _root(x: torch.Tensor) -> torch.Tensor:
    return (x * x).mean(-1, keepdim=True).sqrt()


def _linears(x: Inputs, name: str) -> Iterator[Variant]:
    (source,) = needs(x.tap, x.layer, x.sizes.layers)
    weight, bias = x.parameter(name), x.parameter(name, "bias")
    if weight is None:
        return

    def rows(i: Inputs) -> torch.Tensor:
        return i.value(source)[i.rows].reshape(len(i.rows), -1)

    plus = 0.0 if bias is None else bias
    yield Variant("", lambda i: rows(i) @ weight.T + plus)
    if bias is not None:
        yield Variant("the bias left out", lambda i: rows(i) @ weight.T)
        yield Variant("the bias added twice", lambda i: rows(i) @ weight.T + 2 * bias)
    if weight.size(0) == weight.size(1):
        yield Variant("the weight transposed", lambda i: rows(i) @ weight + plus)
    yield Variant("inputs and weight rounded to bfloat16", lambda i: _bf16(rows(i)) @ _bf16(weight).T + plus)
    yield Variant("inputs and weight rounded to float16", lambda i: _half(rows(i)) @ _half(weight).T + plus)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.half().double()


def _tables(x: Inputs, name: str) -> Iterator[Variant]:
    function = torch.cos if name == "rope.cos" else torch.sin

    def table(angle: torch.Tensor) -> torch.Tensor:
        half = function(angle)
        return torch.cat((half, half), -1)

    def at(i: Inputs, theta: float, shift: int = 0) -> torch.Tensor:
        return oracle.angles(i.rows + shift, i.sizes.head_dim, theta)

    def turned(i: Inputs, theta: float) -> torch.Tensor:
        return table(at(i, theta))

    def scaled(i: Inputs, factor: float) -> torch.Tensor:
        return table(at(i, i.sizes.theta) / factor)

    yield Variant("", lambda i: table(at(i, i.sizes.theta)))
    for theta in (*_THETAS, 10 * x.sizes.theta, x.sizes.theta / 10):
        if theta != x.sizes.theta:
            yield Variant(f"theta {theta:g} instead of {x.sizes.theta:g}", partial(turned, theta=theta))
    yield Variant("the table rounded to bfloat16", lambda i: _bf16(table(at(i, i.sizes.theta))))
    yield Variant("angles rounded to bfloat16", lambda i: table(_bf16(at(i, i.sizes.theta))))
    for factor in (2.0, 4.0, 8.0):
        yield Variant(f"positions divided by {factor:g} (linear scaling)",
                      partial(scaled, factor=factor))  # fmt: skip
    yield Variant("positions one too high", lambda i: table(at(i, i.sizes.theta, 1)))
    yield Variant("positions one too low", lambda i: table(at(i, i.sizes.theta, -1)))
    yield Variant("frequencies of neighbours as pairs (interleaved)",
                  lambda i: function(at(i, i.sizes.theta)).repeat_interleave(2, -1))  # fmt: skip


def _rotations(name: str) -> Iterator[Variant]:
    letter = name[0]

    def source(i: Inputs) -> torch.Tensor:
        norm = f"layers.{i.layer}.{letter}_norm"
        found = i.value(norm if norm in i.values else f"{letter}_proj")
        return _heads(found, i.sizes.head_dim)[i.rows].transpose(0, 1)

    def parts(i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        half = i.sizes.head_dim // 2
        return i.value("rope.cos")[i.rows][:, :half], i.value("rope.sin")[i.rows][:, :half]

    yield Variant("", lambda i: oracle.turn(source(i), *parts(i)).transpose(0, 1))
    yield Variant("not rotated", lambda i: source(i).transpose(0, 1))
    yield Variant("rotated the other way", lambda i: oracle.turn(source(i), parts(i)[0], -parts(i)[1]).transpose(0, 1))
    yield Variant("neighbours rotated as pairs (interleaved)", lambda i: _interleaved(source(i), *parts(i)))


def _interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return out.transpose(0, 1)


def _residuals(x: Inputs, name: str) -> Iterator[Variant]:
    before, update, *_ = needs(x.tap, x.layer, x.sizes.layers)
    yield Variant("", lambda i: (i.value(before) + i.value(update))[i.rows])
    yield Variant("the residual left out", lambda i: i.value(update)[i.rows])
    yield Variant(f"the branch left out ({name})", lambda i: i.value(before)[i.rows])
    if name == "output":
        start = "embed" if x.layer == 0 else f"layers.{(x.layer or 0) - 1}.output"
        if start in x.values:
            yield Variant("the whole layer left out", lambda i: i.value(start)[i.rows])


def _activations() -> Iterator[Variant]:
    functional = torch.nn.functional
    yield Variant("", lambda i: oracle.silu(i.value("gate_proj"))[i.rows])
    yield Variant("GELU instead of SiLU", lambda i: functional.gelu(i.value("gate_proj"))[i.rows])
    yield Variant("GELU (tanh) instead of SiLU",
                  lambda i: functional.gelu(i.value("gate_proj"), approximate="tanh")[i.rows])  # fmt: skip
    yield Variant("ReLU instead of SiLU", lambda i: i.value("gate_proj").relu()[i.rows])
    yield Variant("sigmoid instead of SiLU", lambda i: i.value("gate_proj").sigmoid()[i.rows])
    yield Variant("SiLU of the up projection, not of the gate", lambda i: oracle.silu(i.value("up_proj"))[i.rows])


def _embedding(i: Inputs, scale: float = 1.0, shift: int = 0) -> torch.Tensor:
    table = i.weight("model.embed_tokens.weight")
    assert table is not None
    ids = torch.tensor(i.token_ids)[i.rows]
    return scale * table[(ids + shift) % len(table)].double()


def _embeddings() -> Iterator[Variant]:
    yield Variant("", _embedding)
    yield Variant("scaled by the root of the hidden size", lambda i: _embedding(i, _embedding(i).size(-1) ** 0.5))
    yield Variant("rows of the next token id", lambda i: _embedding(i, shift=1))


def _heads_of_model() -> Iterator[Variant]:
    def head(i: Inputs) -> torch.Tensor:
        table = i.weight("lm_head.weight")
        table = table if table is not None else i.weight("model.embed_tokens.weight")
        assert table is not None
        return i.value("norm")[i.rows] @ table.double().T[:, : i.sizes.vocab]

    def capped(i: Inputs, cap: float) -> torch.Tensor:
        return cap * torch.tanh(head(i) / cap)

    yield Variant("", head)
    for cap in (15.0, 20.0, 30.0, 50.0):
        yield Variant(f"capped at {cap:g} (tanh)", partial(capped, cap=cap))
    yield Variant("scaled by the root of the hidden size", lambda i: head(i) * i.value("norm").size(-1) ** -0.5)
