"""Single resolution of the kernel set (C3): explicit argument > model config > platform default, decided once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import cast

from rollout.errors import UnsupportedFeature
from rollout.kernels.base import KernelSet

_FACTORIES: Mapping[str, tuple[str, str]] = {"cpu": ("rollout.kernels.cpu.kernel_set", "cpu_kernels")}
_PLATFORM_DEFAULT = "cpu"


def available() -> tuple[str, ...]:
    """Names of the kernel sets in this build."""
    return tuple(sorted(_FACTORIES))


def resolve_kernels(explicit: str = "auto", *, model_default: str = "auto", page_size: int = 128) -> KernelSet:
    """The kernel set to use. Everything downstream reads ``.name`` of the result, never the raw setting.

    Raises:
        UnsupportedFeature: for a name that is not in this build; never another set instead.
    """
    name = next((n for n in (explicit, model_default) if n not in ("", "auto")), _PLATFORM_DEFAULT)
    if name not in _FACTORIES:
        raise UnsupportedFeature(
            f"kernel set {name!r} is not in this build; available: {', '.join(available())}", field="kernels.name"
        )
    module, factory = _FACTORIES[name]
    build = cast("Callable[[int], KernelSet]", getattr(importlib.import_module(module), factory))
    return build(page_size)
