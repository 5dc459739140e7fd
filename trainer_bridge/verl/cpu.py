"""verl on a machine without an accelerator: a CPU platform with gloo, through verl's own platform registry.

For tests and small runs. One function of verl is replaced: the one that opens the process group, which would name the
backend "cpu:gloo,cpu:gloo" here. ``environment()`` holds the variables that every process needs. What verl counts as
"GPUs" are then CPU processes: start Ray with as many logical ones (``num_gpus``), since verl counts them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import distributed

PLATFORM = "zerodrift_cpu"
RESOURCE = "GPU"


def _one_backend(original: Any) -> Any:
    @functools.wraps(original)
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize


def environment() -> dict[str, str]:
    """Variables that choose this platform, and verl's FSDP engine, registered for cuda but able to run anywhere."""
    return {
        "VERL_USE_EXTERNAL_MODULES": "trainer_bridge.verl.plugin,trainer_bridge.verl.cpu",
        "VERL_PLATFORM": PLATFORM,
        "VERL_ENGINE_DEVICE": "cuda",
    }


def _device_module() -> types.ModuleType:
    """``torch.cpu`` with the memory calls that verl makes on any device; there is nothing to report."""
    module = types.ModuleType("torch.cpu")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    for name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        module.__dict__[name] = lambda *_, **__: None
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        module.__dict__[name] = lambda *_, **__: 0
    module.__dict__["mem_get_info"] = lambda *_, **__: (0, 0)
    module.__dict__["get_rng_state"] = lambda *_, **__: torch.get_rng_state()
    module.__dict__["set_rng_state"] = lambda state, *_, **__: torch.set_rng_state(state)
    module.__dict__["get_device_name"] = lambda *_, **__: "CPU"
    module.__dict__["is_available"] = lambda: False
    module.__dict__["manual_seed"] = torch.manual_seed
    module.__dict__["manual_seed_all"] = torch.manual_seed
    return module


@PlatformRegistry.register(platform=PLATFORM)
class PlatformCPU(PlatformBase):
    """verl's device interface on the host."""

    def __init__(self) -> None:
        self._module = _device_module()

    @property
    def device_name(self) -> str:
        """ "cpu"."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """No vendor."""
        return "generic"

    @property
    def device_module(self) -> types.ModuleType:
        """See ``_device_module``."""
        return self._module

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never found by probing: a CPU is everywhere, and must be asked for."""
        return False

    def current_device(self) -> Any:
        """A device, not an index: torch reads an index as an accelerator's."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to select."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs behind."""

    def manual_seed(self, seed: int) -> None:
        """Seed the host's generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the host's generator."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """No such allocator."""

    def empty_cache(self) -> None:
        """No such cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Unknown."""
        return None, None

    def communication_backend_name(self) -> str:
        """gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """A name that nobody sets."""
        return "ZERODRIFT_CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler."""
        yield

    def profiler_start(self) -> None:
        """No profiler."""

    def profiler_stop(self) -> None:
        """No profiler."""

    def ray_resource_name(self) -> str:
        """The logical resource that verl counts before it starts."""
        return RESOURCE

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def is_ipc_supported(self) -> bool:
        """No device memory to share."""
        return False

    def cudart(self) -> Any:
        """No runtime."""
        return None


if os.environ.get("VERL_PLATFORM") == PLATFORM:
    distributed.initialize_global_process_group_ray = _one_backend(distributed.initialize_global_process_group_ray)
