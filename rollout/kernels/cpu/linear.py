"""Linear layers of the rollout: weights packed once for oneDNN where that gives the training side's bits, else padded.

The training side multiplies plain weights in invariant mode. Packing changes speed, most of all at few rows. Whether it
keeps the bits is measured at load on this machine for every shape, never assumed; a shape that fails is not packed.
"""

from __future__ import annotations

import torch

from rollout.kernels.cpu.invariant import invariant_mode

PROBE_ROWS = (1, 3, 16, 33)


def packed_product_matches(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the packed product of this shape equals the invariant product, row by row, at several row counts."""
    if weight.dtype != torch.bfloat16 or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    generator = torch.Generator().manual_seed(weight.numel())
    x = torch.randn(max(PROBE_ROWS), weight.size(1), generator=generator).to(weight.dtype)
    packed = _pack(weight)
    with invariant_mode():
        wanted = torch.nn.functional.linear(x, weight, bias)
    return all(torch.equal(_product(x[:rows], packed, bias), wanted[:rows]) for rows in PROBE_ROWS)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 32)
    return packed


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


class RolloutLinear:
    """y = x W^T + b over rows [T, K] -> [T, N]; several layers that share their input may be stacked along N."""

    def __init__(self, layers: list[torch.nn.Linear], *, packed: bool) -> None:
        self._layers = layers
        self._packed = packed
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the layers' present weights (they change in place at a weight update)."""
        weights: list[torch.Tensor] = [layer.weight for layer in self._layers]
        biases: list[torch.Tensor] = [layer.bias for layer in self._layers if layer.bias is not None]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self._bias = None if not biases else torch.cat(biases) if len(biases) > 1 else biases[0]
        self._weight = _pack(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, N]. Unpacked, it must run in invariant mode."""
        if self._packed:
            return _product(x, self._weight, self._bias)
        return torch.nn.functional.linear(x, self._weight, self._bias)


class LinearPlan:
    """Remembers which shapes pack exactly, and whether stacking layers keeps their bits, so each is probed once."""

    def __init__(self) -> None:
        self._exact: dict[tuple[object, ...], bool] = {}

    def build(self, layers: list[torch.nn.Linear]) -> list[RolloutLinear]:
        """One stacked product when that is exact, else one per layer."""
        shape = tuple((tuple(layer.weight.shape), layer.bias is not None, layer.weight.dtype) for layer in layers)
        if len(layers) > 1:
            if ("stack", *shape) not in self._exact:
                self._exact[("stack", *shape)] = self._stacks(layers)
            if self._exact[("stack", *shape)]:
                return [RolloutLinear(layers, packed=self._packs(layers))]
            return [linear for layer in layers for linear in self.build([layer])]
        return [RolloutLinear(layers, packed=self._packs(layers))]

    def _packs(self, layers: list[torch.nn.Linear]) -> bool:
        weight, bias = _stacked(layers)
        key = ("pack", tuple(weight.shape), bias is not None, weight.dtype)
        if key not in self._exact:
            self._exact[key] = packed_product_matches(weight, bias)
        return self._exact[key]

    @torch.no_grad()
    def _stacks(self, layers: list[torch.nn.Linear]) -> bool:
        if len({layer.bias is None for layer in layers}) > 1:
            return False
        weight, bias = _stacked(layers)
        generator = torch.Generator().manual_seed(weight.numel())
        x = torch.randn(max(PROBE_ROWS), weight.size(1), generator=generator).to(weight.dtype)
        with invariant_mode():
            stacked = torch.nn.functional.linear(x, weight, bias)
            apart = torch.cat([layer(x) for layer in layers], dim=1)
        return torch.equal(stacked, apart)

    @property
    def summary(self) -> dict[str, bool]:
        """Probed shape -> whether it is exact, for the log."""
        return {" ".join(map(str, key)): exact for key, exact in self._exact.items()}


def _stacked(layers: list[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return weight, torch.cat(biases) if biases else None
