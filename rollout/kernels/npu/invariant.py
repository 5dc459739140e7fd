"""Invariant mode on the NPU: aten operators replaced through ``torch.library`` while anyone holds the mode.

torch_npu registers ``matmul`` and ``softmax.int`` as operators of their own, with an autograd formula, instead of
letting them decompose. They are replaced at the autograd key by a decomposition, so that every product passes through
``mm``, ``addmm`` or ``bmm``, forward and backward.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rollout.kernels.npu.fixed_shape import Kernel

Replacements = Mapping[str, Callable[[Any], Kernel]]


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


class InvariantMode:
    """Counted installation at one device's dispatch key; the last to leave restores the device's kernels."""

    def __init__(self, key: str, replacements: Replacements) -> None:
        """Args: key: "PrivateUse1" for the NPU, "CPU" where tests emulate it."""
        self.key = key
        self._replacements = replacements
        self._lock = threading.Lock()
        self._depth = 0
        self._library: torch.library.Library | None = None

    @property
    def active(self) -> bool:
        """Whether anyone in the process holds the mode."""
        return self._depth > 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the mode; reentrant and safe across threads."""
        with self._lock:
            if self._depth == 0:
                self._library = self._install()
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0 and self._library is not None:
                    self._library._destroy()
                    self._library = None

    def _install(self) -> torch.library.Library:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch announces that a kernel is overridden, which is the purpose here.
            warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
            for name, build in self._replacements.items():
                original = torch.library.get_kernel(f"aten::{name}", self.key)
                library.impl(name, build(original), self.key, with_keyset=True, allow_override=True)
            for name, function in COMPOSITES.items():
                for key in (f"Autograd{self.key}", self.key):
                    library.impl(name, function, key, allow_override=True)
        return library
