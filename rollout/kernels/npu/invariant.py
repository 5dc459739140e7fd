"""Invariant mode on the NPU: aten operators replaced while anyone holds the mode; see ``OperatorOverrides``.

torch_npu registers ``matmul`` and ``softmax.int`` as operators of their own, with an autograd formula, instead of
letting them decompose. They are replaced at the autograd key by a decomposition, so that every product passes through
``mm``, ``addmm`` or ``bmm``, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollout.kernels.overrides import Kernel, OperatorOverrides, Replacements


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.matmul from mm and bmm; differentiable."""
    if a.dim() == b.dim() == 1:
        return torch.mm(a[None], b[:, None]).reshape(())
    if a.dim() == 1:
        return matmul(a[None], b).squeeze(-2)
    if b.dim() == 1:
        return matmul(a, b[:, None]).squeeze(-1)
    if b.dim() == 2:
        return torch.mm(a.reshape(-1, a.size(-1)), b).reshape(*a.shape[:-1], b.size(-1))
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
    return torch.bmm(left, right).reshape(*batch, a.size(-2), b.size(-1))


def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """torch.softmax from ``_softmax``; differentiable."""
    return torch._softmax(x if dtype is None else x.to(dtype), dim, False)


COMPOSITES: Mapping[str, Kernel] = {"matmul": matmul, "softmax.int": softmax}


class InvariantMode(OperatorOverrides):
    """The mode at one device's dispatch key; tests emulate the NPU at "CPU"."""

    def __init__(self, key: str, replacements: Replacements) -> None:
        super().__init__(key, replacements, COMPOSITES)
