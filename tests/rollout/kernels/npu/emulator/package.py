"""The operators of the Ascend package ``batch_invariant_ops`` in float64 numpy: a row alone, and no torch operator.

Called as public callers call them; the package's schemas are not public.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch


def _double(x: torch.Tensor) -> np.ndarray:
    array: np.ndarray = x.detach().double().numpy()
    return array


def _like(value: np.ndarray, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(value)).to(x.dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., M, K] @ b [..., K, N], each element a sum of its own."""
    left, right = _double(a), np.swapaxes(_double(b), -1, -2)
    return _like((left[..., :, None, :] * right[..., None, :, :]).sum(-1), a)


def log_softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Over one dimension."""
    values = _double(x)
    shifted = values - values.max(dim, keepdims=True)
    return _like(shifted - np.log(np.exp(shifted).sum(dim, keepdims=True)), x)


def emulated_ops(**changed: Any) -> types.SimpleNamespace:
    """Everything the package must have, with replacements or additions by name."""
    ops = {
        "npu_mm_batch_invariant": product,
        "npu_matmul_batch_invariant": product,
        "npu_reduce_mean_batch_invariant": lambda x, dim, keepdim=False: _like(
            np.mean(_double(x), dim, keepdims=keepdim), x
        ),
        "npu_reduce_sum_batch_invariant": lambda x, dim, keepdim=False: _like(
            np.sum(_double(x), dim, keepdims=keepdim), x
        ),
        "npu_softmax_batch_invariant": lambda x, dim: _like(np.exp(_double(log_softmax(x, dim))), x),
        "npu_log_softmax_batch_invariant": log_softmax,
    }
    return types.SimpleNamespace(**(ops | changed))
