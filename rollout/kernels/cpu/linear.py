"""Linear layers of the rollout: the fastest product that gives the training side's bits on this machine.

The training side multiplies plain weights in invariant mode. Three ways are tried for every shape, at load, with inputs
on which an order of summation shows; none is assumed to hold:

1. the products of ``dot`` (bfloat16, AVX512_BF16), in blocks of 512 or 1024 of the inner dimension;
2. weights packed for oneDNN, from as many rows on as that keeps the bits (torch 2.13: 2; at 1 row it may split the
   inner dimension);
3. the invariant product itself, rows padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.errors import ParityError
from rollout.file_pages import let_go
from rollout.kernels.base import Product
from rollout.kernels.cpu import dot
from rollout.kernels.cpu.invariant import ROW_TILE, invariant_mode
from rollout.kernels.probe import cancelling_product

PROBE_ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 64, 128)


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """How one shape is multiplied; neither field set: padded."""

    block: int | None = None
    """inner dimensions of a chain of ``dot``"""
    packed_rows: int | None = None
    """fewest rows from which oneDNN's packed product holds"""

    def __str__(self) -> str:
        if self.block is not None:
            return f"dot in blocks of {self.block}"
        return "padded" if self.packed_rows is None else f"packed from {self.packed_rows} rows"


def plan_product(outer: int, inner: int, bias: torch.Tensor | None, dtype: torch.dtype) -> ProductPlan:
    """The fastest product of this shape that equals the invariant product at every probed number of rows.

    The bias, where there is one, is the real one: it is added before the rounding in one kernel and could be after it
    in another.

    Raises:
        ParityError: not even the invariant product is invariant here.
    """
    x, weight = cancelling_product(max(PROBE_ROWS), inner, outer, dtype)
    wanted = _checked_product(x, weight, bias)
    if dtype != torch.bfloat16:
        return ProductPlan()
    if dot.available() and inner % 2 == 0:
        product = dot.DotProduct([weight], bias, dot.BLOCKS[0])
        for block in dot.BLOCKS:
            product.block = block
            if all(torch.equal(product(x[:rows]), wanted[:rows]) for rows in PROBE_ROWS):
                return ProductPlan(block=block)
        del product
    return ProductPlan(packed_rows=_packed_least_rows(x, weight, bias, wanted))


def _packed_least_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: torch.Tensor
) -> int | None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    packed = _pack(weight)
    least: int | None = None
    for rows in reversed(PROBE_ROWS):
        if not torch.equal(_product(x[:rows], packed, bias), wanted[:rows]):
            break
        least = rows
    return least


def _checked_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The invariant product, proven to be one on this machine.

    Raises:
        ParityError: a row's bits depend on how many rows there are, so nothing here could be exact.
    """
    with invariant_mode():
        wanted = torch.nn.functional.linear(x, weight, bias)
        for rows in PROBE_ROWS:
            if not torch.equal(torch.nn.functional.linear(x[:rows], weight, bias), wanted[:rows]):
                raise ParityError(
                    f"linear {tuple(weight.shape)} in {weight.dtype}: {rows} rows padded to a multiple of {ROW_TILE} "
                    f"differ from {x.size(0)} rows on this processor ({torch.backends.cpu.get_cpu_capability()}); "
                    "nothing computed here could be exact: use another dtype (model.dtype) or another machine"
                )
    return wanted


def stacking_is_exact(layers: list[torch.nn.Linear]) -> bool:
    """Whether one product over the layers' weights, one above the other, gives each layer's own bits."""
    if len({layer.bias is None for layer in layers}) > 1:
        return False
    inner, dtype = layers[0].in_features, layers[0].weight.dtype
    sizes = [layer.out_features for layer in layers]
    x, weight = cancelling_product(33, inner, sum(sizes), dtype)
    bias = stacked_bias(layers)
    with invariant_mode():
        whole = torch.nn.functional.linear(x, weight, bias)
        biases = [None] * len(sizes) if bias is None else list(bias.split(sizes))
        parts = [torch.nn.functional.linear(x, w, b) for w, b in zip(weight.split(sizes), biases, strict=True)]
    return torch.equal(whole, torch.cat(parts, 1))


def stacked_bias(layers: list[torch.nn.Linear]) -> torch.Tensor | None:
    """The layers' biases, one after the other; None when they have none."""
    biases: list[torch.Tensor] = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 32)
    return packed


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


class RolloutLinear:
    """y = x W^T + b over rows [T, K] -> [T, N]; several layers that share their input may be stacked along N."""

    def __init__(self, layers: list[torch.nn.Linear], plan: ProductPlan) -> None:
        self._layers = layers
        self._plan = plan
        self._dot: dot.DotProduct | None = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the layers' present weights (they change in place at a weight update)."""
        weights: list[torch.Tensor] = [layer.weight.detach() for layer in self._layers]
        self._bias = stacked_bias(self._layers)
        if self._plan.block is not None:
            if self._dot is None:
                self._dot = dot.DotProduct(weights, self._bias, self._plan.block)
            else:
                self._dot.pack(weights, self._bias)
            return
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        if self._plan.packed_rows is not None:
            self._weight = _pack(weight)
        else:
            self._weight = weight

    @property
    def packed(self) -> bool:
        """Whether a call reads a copy of the weights instead of the layers' own."""
        return self._plan != ProductPlan() or len(self._layers) > 1

    def described(self, name: str) -> Product:
        """For the certificate."""
        return Product(name, tuple(self._layers), self, str(self._plan))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] contiguous -> [T, N]. Padded, it must run in invariant mode."""
        if self._dot is not None:
            return self._dot(x)
        least = self._plan.packed_rows
        if least is None:
            return torch.nn.functional.linear(x, self._weight, self._bias)
        rows = x.size(0)
        if rows < least:
            x = torch.cat((x, x.new_zeros(least - rows, x.size(1))))
        return _product(x, self._weight, self._bias)[:rows]


class LinearPlan:
    """Builds the rollout's linears; each shape is probed once."""

    def __init__(self) -> None:
        self._plans: dict[tuple[object, ...], ProductPlan] = {}
        self._stacks: dict[tuple[object, ...], bool] = {}

    def build(self, layers: list[torch.nn.Linear]) -> list[RolloutLinear]:
        """One stacked product when that is exact, else one per layer."""
        if len(layers) > 1:
            shape = tuple((tuple(layer.weight.shape), layer.bias is not None, layer.weight.dtype) for layer in layers)
            if shape not in self._stacks:
                self._stacks[shape] = stacking_is_exact(layers)
            if not self._stacks[shape]:
                return [linear for layer in layers for linear in self.build([layer])]
        linear = RolloutLinear(layers, self._plan(layers))
        if linear.packed:
            let_go(layer.weight for layer in layers)
        return [linear]

    def _plan(self, layers: list[torch.nn.Linear]) -> ProductPlan:
        outer, inner = sum(layer.out_features for layer in layers), layers[0].in_features
        bias, dtype = stacked_bias(layers), layers[0].weight.dtype
        key = (outer, inner, bias is not None, dtype)
        if key not in self._plans:
            self._plans[key] = plan_product(outer, inner, bias, dtype)
        return self._plans[key]

    @property
    def summary(self) -> str:
        """What was measured, for the log."""
        plans = [f"{key[0]}x{key[1]}: {plan}" for key, plan in self._plans.items()]
        stacks = [f"stack of {len(key)}: {'exact' if exact else 'apart'}" for key, exact in self._stacks.items()]
        return "; ".join([*plans, *stacks])
