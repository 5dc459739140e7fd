"""The code lines of the package flash_attn_npu: what each can promise, as data, and how an installed one is recognised.

Read in the sources of 0.2.0b1, 0.3.0 and 0.4.2.post1. The lines share a wheel name and even a module name, so a line is
recognised by its callables together with the version of the wheel, never by a module alone: in 0.2.0b1 the name
``flash_attn_npu_3`` is the bare C extension.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rollout.errors import ConfigError, UnsupportedFeature

DISTRIBUTION = "flash_attn_npu"
INSTALL = (
    "install flash_attn_npu from PyPI (0.3 or later) or its branch trainlnferConsist (0.2.0b1); both are built on the "
    "host with CANN >= 8.5 (docs/npu.md)"
)


@dataclass(frozen=True, slots=True)
class CodeLine:
    """One incompatible line of the package."""

    name: str
    first: tuple[int, ...]
    """first version of the line"""
    before: tuple[int, ...] | None
    """first version that is no longer of it; None: open"""
    kvcache: str
    """``module:callable`` of ``flash_attn_with_kvcache``"""
    varlen: str
    """``module:callable`` of the training attention; differentiable"""
    varlen_is_v2: bool
    """the training call has FlashAttention-2's signature"""
    width_dependent_sum: bool
    """the softmax row sum takes another order when the last key tile is 256 or 512 wide, so it depends on query
    length"""
    appends_new_keys: bool | None
    """what ``k=``/``v=`` do: None: ignored or appended, by release; we never pass them"""
    sliding_window: bool
    softcap: bool
    promise: str
    """in words, for reports"""


TRAIN_INFER = CodeLine(
    name="train-infer",
    first=(0, 2, 0),
    before=(0, 3),
    kvcache="flash_attn_npu_v3:flash_attn_with_kvcache",
    varlen="flash_attn_npu:flash_attn_varlen_func",
    varlen_is_v2=True,
    width_dependent_sum=False,
    appends_new_keys=False,
    sliding_window=False,
    softcap=False,
    promise="row sum always in one order; no backward in v3, so training calls the v2 module of the same wheel",
)
LATER = CodeLine(
    name="later",
    first=(0, 3),
    before=None,
    kvcache="flash_attn_npu_3:flash_attn_with_kvcache",
    varlen="flash_attn_npu_3:flash_attn_varlen_func",
    varlen_is_v2=False,
    width_dependent_sum=True,
    appends_new_keys=None,
    sliding_window=True,
    softcap=True,
    promise="row sum by the width of the last key tile: plain decode differs from training for part of the positions",
)
LINES = (TRAIN_INFER, LATER)


@dataclass(frozen=True, slots=True)
class InstalledAttention:
    """A recognised installation."""

    line: CodeLine
    version: str
    kvcache: Callable[..., Any]
    varlen: Callable[..., Any]


def parse_version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "0.2.0b1" -> (0, 2, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def line_of(version: str) -> CodeLine:
    """The line a version of the wheel belongs to.

    Raises:
        UnsupportedFeature: a version before the first line; its v3 has neither backward nor a fixed row sum.
    """
    numbers = parse_version(version)
    for line in LINES:
        if numbers >= line.first and (line.before is None or numbers < line.before):
            return line
    raise UnsupportedFeature(f"flash_attn_npu {version} is older than any line that can be used; {INSTALL}")


def recognise(
    load: Callable[[str], ModuleType] = importlib.import_module,
    version_of: Callable[[str], str] = importlib.metadata.version,
) -> InstalledAttention:
    """Find the package and prove that callables and version agree.

    Raises:
        UnsupportedFeature: absent, too old, or refusing this device. ConfigError: parts of two lines, or a part
        missing.
    """
    try:
        version = version_of(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedFeature(f"the package flash_attn_npu is not installed; {INSTALL}") from None
    line = line_of(version)
    return InstalledAttention(
        line, version, _callable(line.kvcache, version, load), _callable(line.varlen, version, load)
    )


def _callable(place: str, version: str, load: Callable[[str], ModuleType]) -> Callable[..., Any]:
    module_name, _, name = place.partition(":")
    try:
        module = load(module_name)
    except ImportError as error:
        raise ConfigError(
            f"flash_attn_npu {version} is installed but {module_name} cannot be imported ({error}); its NPU build is "
            f"missing or made for another torch: reinstall it; {INSTALL}"
        ) from error
    except RuntimeError as error:
        # The package asks for the device's name while it is imported.
        raise UnsupportedFeature(f"{module_name} of flash_attn_npu {version} refuses this device: {error}") from error
    found = getattr(module, name, None)
    if found is None and module_name == "flash_attn_npu_v3":
        found = getattr(getattr(module, "flash_attn_interface", None), name, None)
    if not callable(found):
        raise ConfigError(
            f"{module_name} has no {name}, though flash_attn_npu {version} should bring it: parts of two installations "
            f"lie over each other; uninstall flash_attn_npu, delete what is left of it, and {INSTALL}"
        )
    function: Callable[..., Any] = found
    return function
