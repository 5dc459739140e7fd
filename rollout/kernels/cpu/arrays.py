"""Tensors as numpy arrays for compiled code."""

from __future__ import annotations

import numpy as np
import torch


def stored_type(dtype: torch.dtype) -> type:
    """How compiled code holds a dtype: bfloat16 as its uint16 bits, else float32."""
    return np.uint16 if dtype == torch.bfloat16 else np.float32


def array_of(x: torch.Tensor) -> np.ndarray:
    """View of a tensor (copied only if not contiguous); bfloat16 as its uint16 bits."""
    x = x.detach().contiguous()
    array: np.ndarray = x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return array
