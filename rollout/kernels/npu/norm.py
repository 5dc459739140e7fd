"""RMSNorm by ``npu_rms_norm``, bound to the modules of a loaded model.

The fused ``npu_add_rms_norm`` is never called: it is not row-invariant. The models add first, then norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from rollout.kernels.npu.fixed_shape import ROW_TILE, in_tiles

MODULES = frozenset({"LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3VLTextRMSNorm", "Qwen2_5_VLRMSNorm"})
"""weight * x / sqrt(mean(x^2) + variance_epsilon); classes with another formula keep their own forward"""


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, tiled: bool) -> torch.Tensor:
        def run(rows: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.ops.npu.npu_rms_norm(rows, weight, epsilon)[0]
            return out

        rows = x.reshape(-1, x.size(-1))
        ctx.save_for_backward(rows, weight)
        ctx.epsilon = epsilon
        out = in_tiles(rows, ROW_TILE, run) if tiled else run(rows)
        return out.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        rstd = torch.ops.npu.npu_rms_norm(rows, weight, ctx.epsilon)[1]
        grad = grads[0].reshape(rows.shape).contiguous()
        dx, dweight = torch.ops.npu.npu_rms_norm_backward(grad, rows, weight, rstd)
        return dx.reshape(grads[0].shape), dweight.to(weight.dtype), None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, tiled: bool) -> torch.Tensor:
    """x [..., N], weight [N]; differentiable. ``tiled``: the operator sees a fixed number of rows."""
    apply: Callable[..., torch.Tensor] = _RmsNorm.apply
    return apply(x, weight, epsilon, tiled)


def _forward(module: Any, tiled: bool, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, module.weight, float(module.variance_epsilon), tiled=tiled)


def bind_norms(model: torch.nn.Module, *, tiled: bool) -> int:
    """Give every known RMSNorm of the model this forward; returns how many."""
    found = [m for m in model.modules() if type(m).__name__ in MODULES]
    for module in found:
        module.forward = functools.partial(_forward, module, tiled)
    return len(found)
