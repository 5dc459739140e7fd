"""Tensors as numpy arrays for compiled code."""

from __future__ import annotations

import numpy as np
import torch


def array_of(x: torch.Tensor) -> np.ndarray:
    """View of a tensor (copied only if not contiguous); bfloat16 as its uint16 bits."""
    x = x.detach().contiguous()
    array: np.ndarray = x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return array
