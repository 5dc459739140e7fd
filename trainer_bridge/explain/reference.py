"""Float64 values of one operation from the inputs both sides share, and of the operation with a usual fault in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from rollout import oracle
from rollout.oracle import Sizes

_EPSILONS = (1e-3, 1e-5, 1e-6, 1e-8, 1e-12, 0.0)
_THETAS = (1e4, 1e5, 5e5, 1e6)
_WINDOWS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an operation read. S rows, equal on both sides."""

    tap: str
    layer: int | None
    values: Mapping[str, torch.Tensor]
    """tap -> [S, ...]"""
    rows: torch.Tensor
    """int64 rows to compute"""
    token_ids: tuple[int, ...]
    sizes: Sizes
    dtype: torch.dtype
    weight: Callable[[str], torch.Tensor | None]
    """parameter name -> values"""

    @property
    def operation(self) -> str:
        """Tap without its layer."""
        return self.tap.split(".", 2)[2] if self.layer is not None else self.tap

    def value(self, tap: str) -> torch.Tensor:
        """float64 [S, ...] of a tap of this layer, or of the model."""
        name = tap if tap in self.values else f"layers.{self.layer}.{tap}"
        return self.values[name].double()

    def parameter(self, module: str, leaf: str = "weight") -> torch.Tensor | None:
        """float64 parameter of a module of this layer, or of the model."""
        part = "mlp." if module in ("gate_proj", "up_proj", "down_proj") else ""
        part = "self_attn." if module in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm") else part
        prefix = f"model.layers.{self.layer}." if self.layer is not None else "model."
        found = self.weight(f"{prefix}{part}{module}.{leaf}")
        return None if found is None else found.double()


@dataclass(frozen=True, slots=True)
class Variant:
    """The operation, or the operation with a fault. ``words`` is empty for the right one."""

    words: str
    compute: Callable[[Inputs], torch.Tensor]
    """float64 [rows, ...]"""


def needs(tap: str, layer: int | None, layers: int) -> tuple[str, ...]:
    """Taps an operation reads."""
    if layer is None:
        return {"norm": (f"layers.{layers - 1}.output",), "logits": ("norm",)}.get(tap, ())
    before = "embed" if layer == 0 else f"layers.{layer - 1}.output"
    own = f"layers.{layer}."
    table: dict[str, tuple[str, ...]] = {
        "input_layernorm": (before,),
        "q_proj": (f"{own}input_layernorm",),
        "k_proj": (f"{own}input_layernorm",),
        "v_proj": (f"{own}input_layernorm",),
        "q_norm": (f"{own}q_proj",),
        "k_norm": (f"{own}k_proj",),
        "queries": (f"{own}q_norm", f"{own}q_proj", "rope.cos", "rope.sin"),
        "keys": (f"{own}k_norm", f"{own}k_proj", "rope.cos", "rope.sin"),
        "values": (f"{own}v_proj",),
        "attention": (f"{own}queries", f"{own}keys", f"{own}values"),
        "o_proj": (f"{own}attention",),
        "attn_residual": (before, f"{own}o_proj"),
        "post_attention_layernorm": (f"{own}attn_residual",),
        "gate_proj": (f"{own}post_attention_layernorm",),
        "up_proj": (f"{own}post_attention_layernorm",),
        "act": (f"{own}gate_proj",),
        "gated": (f"{own}act", f"{own}up_proj"),
        "down_proj": (f"{own}gated",),
        "output": (f"{own}attn_residual", f"{own}down_proj"),
    }
    return table.get(tap.split(".", 2)[2], ())


def variants(x: Inputs) -> Iterator[Variant]:
    """The right operation first, then the usual faults. Nothing for an operation that is not known."""
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
        yield from _attentions(x)
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
    yield Variant("LayerNorm instead of RMSNorm", lambda i: norm(i, right, weight, True))


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


def _attentions(x: Inputs) -> Iterator[Variant]:
    scale = x.sizes.head_dim**-0.5

    def run(i: Inputs, *, tiled: bool = False, by: float = scale, window: int = 0, shift: int = 0) -> torch.Tensor:
        q, k, v = (i.value(n).transpose(0, 1) for n in ("queries", "keys", "values"))
        if tiled:
            group = q.size(0) // k.size(0)
            k, v = k.repeat(group, 1, 1), v.repeat(group, 1, 1)
        outs = [oracle.attend(q[:, r : r + 1], k, v, by, first=r, window=window, shift=shift) for r in i.rows.tolist()]
        return torch.cat(outs, 1).transpose(0, 1)

    yield Variant("", run)
    if x.sizes.heads != x.sizes.kv_heads:
        yield Variant("query heads paired with KV heads in turn (0, 1, 0, 1) instead of in groups (0, 0, 1, 1)",
                      lambda i: run(i, tiled=True))  # fmt: skip
    yield Variant("every row sees one key too many (causal mask off by one)", lambda i: run(i, shift=1))
    yield Variant("every row misses its own key (causal mask off by one)", lambda i: run(i, shift=-1))
    yield Variant("no causal mask", lambda i: run(i, shift=1 << 30))
    for window in _WINDOWS:
        if window <= int(x.rows.max()):
            yield Variant(f"a sliding window of {window} keys", partial(run, window=window))
    yield Variant("no scale", lambda i: run(i, by=1.0))
    yield Variant("scale 1 / D instead of its root", lambda i: run(i, by=1.0 / i.sizes.head_dim))


def _residuals(x: Inputs, name: str) -> Iterator[Variant]:
    before, update = needs(x.tap, x.layer, x.sizes.layers)
    yield Variant("", lambda i: (i.value(before) + i.value(update))[i.rows])
    yield Variant("the residual left out", lambda i: i.value(update)[i.rows])
    yield Variant(f"the branch left out ({name})", lambda i: i.value(before)[i.rows])


def _activations() -> Iterator[Variant]:
    functional = torch.nn.functional
    yield Variant("", lambda i: oracle.silu(i.value("gate_proj"))[i.rows])
    yield Variant("GELU instead of SiLU", lambda i: functional.gelu(i.value("gate_proj"))[i.rows])
    yield Variant("GELU (tanh) instead of SiLU",
                  lambda i: functional.gelu(i.value("gate_proj"), approximate="tanh")[i.rows])  # fmt: skip
    yield Variant("ReLU instead of SiLU", lambda i: i.value("gate_proj").relu()[i.rows])


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
