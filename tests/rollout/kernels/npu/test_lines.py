"""Recognising the code lines of flash_attn_npu: callables and version together, never a module alone."""

from __future__ import annotations

import importlib.metadata
import types

import pytest

from rollout.errors import ConfigError, UnsupportedFeature
from rollout.kernels.npu.lines import LATER, LINES, TRAIN_INFER, line_of, recognise
from tests.rollout.kernels.npu.emulator.fa3 import EmulatedPackage


@pytest.mark.parametrize(
    ("version", "line"),
    [("0.2.0b1", TRAIN_INFER), ("0.2.1", TRAIN_INFER), ("0.3.0", LATER), ("0.4.2.post1", LATER), ("1.0", LATER)],
)
def test_version_decides_the_line(version: str, line: object) -> None:
    assert line_of(version) is line


@pytest.mark.parametrize("version", ["0.1.0", "0.1.1", "nonsense"])
def test_older_versions_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedFeature, match="older than any line"):
        line_of(version)


@pytest.mark.parametrize("version", ["0.2.0b1", "0.4.2.post1"])
def test_an_installation_is_recognised(version: str) -> None:
    package = EmulatedPackage(version)
    installed = recognise(package.load, lambda _: version)
    assert installed.line is line_of(version) and installed.version == version
    assert installed.kvcache.__name__ == "flash_attn_with_kvcache"
    assert installed.varlen.__name__ == "flash_attn_varlen_func"


def test_functions_of_the_interface_module_are_found() -> None:
    """The train-infer line exports only the KV-cache call at the top; another build hides that one too."""
    package = EmulatedPackage("0.2.0b1")

    def load(name: str) -> types.ModuleType:
        module = package.load(name)
        if name == "flash_attn_npu_v3":
            hidden = types.ModuleType(name)
            hidden.flash_attn_interface = module  # type: ignore[attr-defined]
            return hidden
        return module

    assert callable(recognise(load, lambda _: "0.2.0b1").kvcache)


def test_absent_package() -> None:
    def version_of(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with pytest.raises(UnsupportedFeature, match=r"not installed.*CANN"):
        recognise(EmulatedPackage().load, version_of)


def test_a_version_of_one_line_with_modules_of_the_other() -> None:
    """The trap of the bare C extension: ``flash_attn_npu_3`` imports on the train-infer line and has no function."""
    with pytest.raises(ConfigError, match="two installations"):
        recognise(EmulatedPackage("0.2.0b1").load, lambda _: "0.4.2.post1")
    with pytest.raises(ConfigError, match="flash_attn_npu_v3 cannot be imported"):
        recognise(EmulatedPackage("0.4.2.post1").load, lambda _: "0.2.0b1")


def test_a_package_that_refuses_the_device() -> None:
    def load(name: str) -> types.ModuleType:
        raise RuntimeError("Unsupported Ascend device: 910_9391")

    with pytest.raises(UnsupportedFeature, match=r"refuses this device: .*910_9391"):
        recognise(load, lambda _: "0.3.0")


def test_lines_do_not_overlap() -> None:
    assert [line.before for line in LINES[:-1]] == [line.first for line in LINES[1:]]
    assert LINES[-1].before is None
