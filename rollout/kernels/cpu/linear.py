"""Linear layers of the rollout: weights packed once for oneDNN where that gives the training side's bits, else padded.

The training side multiplies plain weights in invariant mode. Packing changes speed, most of all at few rows. From how
many rows on it keeps the bits is measured at load, on this machine, for every shape, with inputs on which an order of
summation shows; it is never assumed. (torch 2.13: from 2 rows on; at 1 row a long inner dimension is split.)
"""

from __future__ import annotations

import torch

from rollout.errors import ParityError
from rollout.kernels.cpu.invariant import ROW_TILE, invariant_mode
from rollout.kernels.probe import cancelling_product

PROBE_ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 64, 128)


def packed_least_rows(outer: int, inner: int, bias: torch.Tensor | None, dtype: torch.dtype) -> int | None:
    """Fewest rows from which the packed product of this shape equals the invariant product; None when it does not.

    The bias, where there is one, is the real one: it is added before the rounding in one kernel and could be after it
    in another.
    """
    x, weight = cancelling_product(max(PROBE_ROWS), inner, outer, dtype)
    if dtype != torch.bfloat16 or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        _checked_product(x, weight, bias)
        return None
    packed = _pack(weight)
    wanted = _checked_product(x, weight, bias)
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

    def __init__(self, layers: list[torch.nn.Linear], *, least_rows: int | None) -> None:
        self._layers = layers
        self._least_rows = least_rows
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the layers' present weights (they change in place at a weight update)."""
        weights: list[torch.Tensor] = [layer.weight.detach() for layer in self._layers]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self._bias = stacked_bias(self._layers)
        self._weight = weight if self._least_rows is None else _pack(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, N]. Unpacked, it must run in invariant mode."""
        if self._least_rows is None:
            return torch.nn.functional.linear(x, self._weight, self._bias)
        rows = x.size(0)
        if rows < self._least_rows:
            x = torch.cat((x, x.new_zeros(self._least_rows - rows, x.size(1))))
        return _product(x, self._weight, self._bias)[:rows]


class LinearPlan:
    """Builds the rollout's linears; each shape is probed once."""

    def __init__(self) -> None:
        self._least_rows: dict[tuple[object, ...], int | None] = {}
        self._stacks: dict[tuple[object, ...], bool] = {}

    def build(self, layers: list[torch.nn.Linear]) -> list[RolloutLinear]:
        """One stacked product when that is exact, else one per layer."""
        if len(layers) > 1:
            shape = tuple((tuple(layer.weight.shape), layer.bias is not None, layer.weight.dtype) for layer in layers)
            if shape not in self._stacks:
                self._stacks[shape] = stacking_is_exact(layers)
            if not self._stacks[shape]:
                return [linear for layer in layers for linear in self.build([layer])]
        return [RolloutLinear(layers, least_rows=self._rows(layers))]

    def _rows(self, layers: list[torch.nn.Linear]) -> int | None:
        outer, inner = sum(layer.out_features for layer in layers), layers[0].in_features
        bias, dtype = stacked_bias(layers), layers[0].weight.dtype
        key = (outer, inner, bias is not None, dtype)
        if key not in self._least_rows:
            self._least_rows[key] = packed_least_rows(outer, inner, bias, dtype)
        return self._least_rows[key]

    @property
    def summary(self) -> str:
        """What was measured, for the log."""
        packed = [
            f"{k[0]}x{k[1]}: {'not packed' if r is None else f'packed from {r} rows'}"
            for k, r in self._least_rows.items()
        ]
        return "; ".join(
            [*packed, *(f"stack of {len(k)}: {'exact' if e else 'apart'}" for k, e in self._stacks.items())]
        )
