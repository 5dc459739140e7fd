"""Invariant mode for CPU: aten kernels replaced by row-invariant ones while it is active; see ``OperatorOverrides``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollout.kernels.cpu import activation, logprob
from rollout.kernels.cpu.fused import mean_rows
from rollout.kernels.overrides import OperatorOverrides

ROW_TILE = 16
"""Products run on a multiple of this many rows: MKL and oneDNN pick other kernels, and other orders, for fewer rows."""
_PARALLEL_REDUCE_ELEMENTS = 32768  # aten's GRAIN_SIZE: from here on a reduction to one element is split over threads
_SUPPORTED = (torch.float32, torch.bfloat16)


def _pad_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Zero rows appended up to a multiple of ROW_TILE."""
    missing = -x.size(dim) % ROW_TILE
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)


def _mm(original: Any) -> Callable[..., torch.Tensor]:
    def mm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = original.call_boxed(keys, _pad_rows(a, 0), b)
        return result[: a.size(0)]

    return mm


def _addmm(original: Any) -> Callable[..., torch.Tensor]:
    def addmm(
        keys: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        if bias.dim() == 2 and bias.size(0) == a.size(0):
            bias = _pad_rows(bias, 0)
        result: torch.Tensor = original.call_boxed(keys, bias, _pad_rows(a, 0), b, beta=beta, alpha=alpha)
        return result[: a.size(0)]

    return addmm


def _bmm(original: Any) -> Callable[..., torch.Tensor]:
    def bmm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = original.call_boxed(keys, _pad_rows(a, 1), b)
        return result[:, : a.size(1)]

    return bmm


def _elementwise(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Callable[..., torch.Tensor]]:
    def build(original: Any) -> Callable[..., torch.Tensor]:
        def replaced(keys: Any, x: torch.Tensor) -> torch.Tensor:
            if x.dtype in _SUPPORTED:
                return function(x)
            result: torch.Tensor = original.call_boxed(keys, x)
            return result

        return replaced

    return build


def _in_place(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Callable[..., torch.Tensor]]:
    def build(original: Any) -> Callable[..., torch.Tensor]:
        def replaced(keys: Any, x: torch.Tensor) -> torch.Tensor:
            if x.dtype in _SUPPORTED:
                return x.copy_(function(x))
            original.call_boxed(keys, x)
            return x

        return replaced

    return build


def _gelu(original: Any) -> Callable[..., torch.Tensor]:
    def gelu(keys: Any, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        if x.dtype in _SUPPORTED:
            return activation.gelu(x, approximate)
        result: torch.Tensor = original.call_boxed(keys, x, approximate=approximate)
        return result

    return gelu


def _rsqrt(original: Any) -> Callable[..., torch.Tensor]:
    def rsqrt(keys: Any, x: torch.Tensor) -> torch.Tensor:
        # float32 1/sqrt rounds every step correctly in vector body and tail alike; the bfloat16 kernel does not.
        if x.dtype != torch.bfloat16:
            result: torch.Tensor = original.call_boxed(keys, x)
            return result
        widened: torch.Tensor = original.call_boxed(keys, x.float())
        return widened.bfloat16()

    return rsqrt


def _reduction(original: Any) -> Callable[..., torch.Tensor]:
    def reduce(
        keys: Any,
        x: torch.Tensor,
        dim: Sequence[int] | None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        dims = [d % x.dim() for d in dim] if dim and x.dim() else list(range(x.dim()))
        outputs = x.numel()
        for d in dims:
            outputs //= max(x.size(d), 1)
        if outputs != 1 or x.numel() < _PARALLEL_REDUCE_ELEMENTS:
            result: torch.Tensor = original.call_boxed(keys, x, dim, keepdim, dtype=dtype)
            return result
        # A single output would be summed in pieces, one per thread: give it a neighbour, as any batch would.
        pair = torch.stack((x, x))
        result = original.call_boxed(keys, pair, [d + 1 for d in dims], keepdim, dtype=dtype)
        return result[0]

    return reduce


def _mean(original: Any) -> Callable[..., torch.Tensor]:
    guarded = _reduction(original)

    def mean(
        keys: Any,
        x: torch.Tensor,
        dim: Sequence[int] | None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        last = x.dim() > 0 and dim is not None and len(dim) == 1 and dim[0] in (-1, x.dim() - 1)
        if not last or x.dtype != torch.float32 or dtype not in (None, torch.float32) or x.numel() == 0:
            return guarded(keys, x, dim, keepdim, dtype=dtype)
        # RMSNorm's mean: the order that the rollout's fused norm uses, for any number of rows.
        out = torch.empty(x.shape[:-1])
        mean_rows(x.contiguous().view(-1, x.size(-1)).numpy(), out.view(-1).numpy())
        return out.unsqueeze(-1) if keepdim else out

    return mean


def _log_softmax(original: Any) -> Callable[..., torch.Tensor]:
    def log_softmax(keys: Any, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if x.dtype == torch.float32 and x.dim() > 0 and dim % x.dim() == x.dim() - 1 and not half_to_float:
            return logprob.log_softmax(x)
        result: torch.Tensor = original.call_boxed(keys, x, dim, half_to_float)
        return result

    return log_softmax


_REPLACEMENTS: dict[str, Callable[[Any], Callable[..., torch.Tensor]]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "silu": _elementwise(activation.silu),
    "sigmoid": _elementwise(activation.sigmoid),
    "gelu": _gelu,
    "silu_": _in_place(activation.silu),
    "sigmoid_": _in_place(activation.sigmoid),
    "rsqrt": _rsqrt,
    "sum.dim_IntList": _reduction,
    "mean.dim": _mean,
    "_log_softmax": _log_softmax,
    "cos": _elementwise(activation.cos),
    "sin": _elementwise(activation.sin),
}


@functools.lru_cache(maxsize=1)
def overrides() -> OperatorOverrides:
    """The process's one installation, made on first use."""
    return OperatorOverrides("CPU", _REPLACEMENTS)


def invariant_mode() -> contextlib.AbstractContextManager[None]:
    """Row-invariant aten kernels inside the block; reentrant and safe across threads."""
    return overrides()()
