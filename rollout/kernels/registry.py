"""Single resolution of the kernel set (C3): explicit argument > model config > platform default, decided once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from rollout.config import KernelSettings, Settings
from rollout.errors import ConfigError, UnsupportedFeature
from rollout.kernels.base import FEATURES, Capabilities, KernelSet
from rollout.kernels.npu.host import device_nodes

_FACTORIES: Mapping[str, tuple[str, str]] = {
    "cpu": ("rollout.kernels.cpu.kernel_set", "cpu_kernels"),
    "npu": ("rollout.kernels.npu.kernel_set", "npu_kernels"),
}
_OPTIONS: Mapping[str, tuple[str, ...]] = {"cpu": (), "npu": ("attention_plan", "invariant_ops")}
"""Settings of ``kernels`` beside the name that a set takes."""


def available() -> tuple[str, ...]:
    """Names of the kernel sets in this build."""
    return tuple(sorted(_FACTORIES))


def platform_default(nodes: Callable[[], tuple[str, ...]] = device_nodes) -> str:
    """ "npu" where an Ascend device is, even if its software is not: that is then said, never passed over; else
    "cpu"."""
    return "npu" if nodes() else "cpu"


def kernel_name(explicit: str = "auto", *, model_default: str = "auto") -> str:
    """The name to resolve, without loading anything.

    Raises:
        UnsupportedFeature: for a name that is not in this build; never another set instead.
    """
    name = next((n for n in (explicit, model_default) if n not in ("", "auto")), None) or platform_default()
    if name not in _FACTORIES:
        raise UnsupportedFeature(
            f"kernel set {name!r} is not in this build; available: {', '.join(available())}", field="kernels.name"
        )
    return name


def resolve_kernels(
    explicit: str = "auto",
    *,
    model_default: str = "auto",
    page_size: int = 128,
    attention_plan: str = "auto",
    invariant_ops: str = "auto",
) -> KernelSet:
    """The kernel set to use. Everything downstream reads ``.name`` of the result, never the raw setting.

    Raises:
        UnsupportedFeature: for a name that is not in this build, or a device that is not there; never another set
            instead. ConfigError: an option that the set does not have, or a broken installation.
    """
    name = kernel_name(explicit, model_default=model_default)
    given = {"attention_plan": attention_plan, "invariant_ops": invariant_ops}
    for option, value in given.items():
        if value != "auto" and option not in _OPTIONS[name]:
            raise ConfigError(
                f"kernels.{option}={value}, which kernel set {name!r} does not have; leave it at auto",
                field=f"kernels.{option}",
            )
    module, factory = _FACTORIES[name]
    build = cast("Callable[..., KernelSet]", getattr(importlib.import_module(module), factory))
    return build(page_size, **{option: given[option] for option in _OPTIONS[name]})


def kernels_of(settings: Settings) -> KernelSet:
    """The kernel set that settings ask for; raises what ``resolve_kernels`` raises."""
    chosen: KernelSettings = settings.kernels
    return resolve_kernels(
        chosen.name,
        page_size=settings.engine.page_size,
        attention_plan=chosen.attention_plan,
        invariant_ops=chosen.invariant_ops,
    )


# ---- what each set supports, without a device -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetColumn:
    """One column of ``zerodrift kernels``."""

    title: str
    name: str
    capabilities: Capabilities
    support: Mapping[str, str]
    """feature -> words"""
    providers: Mapping[str, str] | None
    """operation -> implementation; None where the set cannot be built here"""
    here: str
    """"ready", or why the set cannot be built on this host"""


def columns() -> tuple[SetColumn, ...]:
    """What each set supports by its own declaration, and whether it can be built here."""
    from rollout.kernels.cpu.kernel_set import CpuKernelSet
    from rollout.kernels.npu.capabilities import CAPABILITIES, describe
    from rollout.kernels.npu.lines import LINES

    def words(capabilities: Capabilities) -> dict[str, str]:
        return {feature: "yes" if feature in capabilities.features else "no" for feature in FEATURES}

    cpu_providers, cpu_here = _try("cpu")
    npu_providers, npu_here = _try("npu")
    found = [
        SetColumn("cpu", "cpu", CpuKernelSet.capabilities, words(CpuKernelSet.capabilities), cpu_providers, cpu_here)
    ]
    for line in LINES:
        title = f"npu, {line.name} line"
        support = {feature: describe(feature, line) for feature in FEATURES}
        providers = npu_providers if npu_providers and f"line {line.name}" in npu_providers["attention"] else None
        found.append(SetColumn(title, "npu", CAPABILITIES, support, providers, npu_here))
    return tuple(found)


def _try(name: str) -> tuple[Mapping[str, str] | None, str]:
    try:
        return resolve_kernels(name).providers(), "ready"
    except (UnsupportedFeature, ConfigError) as error:
        return None, error.message
