"""aten operators replaced through ``torch.library`` while anyone holds the mode.

The switch follows thinking-machines' ``set_batch_invariant_mode``. The dispatcher's table belongs to the process, so
nested or concurrent uses share one installation, counted; the last to leave restores the device's own kernels. Autograd
is untouched: formulas sit above the replaced kernels, and the products of a backward pass are invariant too.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Kernel = Callable[..., Any]
Replacements = Mapping[str, Callable[[Any], Kernel]]
"""aten operator -> builder of its replacement from the original kernel"""


class OperatorOverrides:
    """Counted installation at one device's dispatch key; call it for the mode."""

    def __init__(self, key: str, replacements: Replacements, composites: Mapping[str, Kernel] | None = None) -> None:
        """
        Args:
            key: dispatch key, "CPU" or "PrivateUse1" (the NPU).
            composites: operators replaced at the autograd key too, by a differentiable decomposition.
        """
        self.key = key
        self._replacements = replacements
        self._composites = composites or {}
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
            for name, function in self._composites.items():
                for key in (f"Autograd{self.key}", self.key):
                    library.impl(name, function, key, allow_override=True)
        return library
