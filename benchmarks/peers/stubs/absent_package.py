"""A package that is not there: everything in it can be imported and named, nothing in it can be used."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn


class _AbsentMeta(type):
    """Classes whose attributes are absent, too; libraries name such constants while they are imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}")


def absent(name: str) -> type:
    """A class that can be named and derived from, but not called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is a stand-in: the package has no build for this machine on PyPI")

    return _AbsentMeta(name.rpartition(".")[2], (), {"__new__": refuse, "__qualname__": name})


class AbsentModule(ModuleType):
    """A module in which every name is absent."""

    __path__: list[str] = []  # noqa: RUF012  what makes a module a package
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{self.__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of one package."""

    def __init__(self, package: str) -> None:
        self._prefix = package + "."

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.startswith(self._prefix):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


def stand_in(package: str) -> None:
    """Make the module that calls this an absent package of that name."""
    sys.modules[package].__class__ = AbsentModule
    sys.meta_path.append(_Submodules(package))
