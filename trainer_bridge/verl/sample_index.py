"""Tells our router which sample of its prompt a request belongs to, where verl knows it and does not say.

verl gives every agent loop its place: ``priority`` in the batch (V0), ``session_id`` among a prompt's samples (V1).
Only the single-turn loop of V0 hands it on to the balancer. Without it siblings are told apart by their order of
arrival, and two equal runs may hold equal samples in other rows. So the place is kept in a context variable while a
loop runs, and put into the balancer's fields. Two methods of verl are wrapped once their module has been imported;
importing it here would cost every process of verl seconds.
"""

from __future__ import annotations

import contextvars
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from rollout.errors import UnsupportedFeature

LOOPS, CLIENT = "verl.experimental.agent_loop.agent_loop", "verl.workers.rollout.llm_server"
_index: contextvars.ContextVar[int | None] = contextvars.ContextVar("zerodrift_sample_index", default=None)
_MARK = "_zerodrift_index"
Patch = Callable[[types.ModuleType], None]


def install() -> None:
    """Wrap both methods, now or when their modules are imported. Idempotent."""
    for name, patch in ((LOOPS, wrap_loops), (CLIENT, wrap_client)):
        module = sys.modules.get(name)
        # A module that is still being imported lacks the class.
        if module is not None and hasattr(module, _CLASSES[name]):
            patch(module)
        elif not any(isinstance(finder, AfterImport) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, AfterImport(name, patch))


def wrap_loops(module: types.ModuleType) -> None:
    """An agent loop runs with its place in the context.

    Raises:
        UnsupportedFeature: this verl has no such method.
    """
    original, worker = _method(module, "_run_agent_loop")
    if original is None:
        return

    @functools.wraps(original)
    async def run(self: Any, sampling_params: Any, trajectory: Any, **arguments: Any) -> Any:
        place = arguments.get("priority", arguments.get("session_id"))
        token = _index.set(None if place is None else int(place))
        try:
            return await original(self, sampling_params, trajectory, **arguments)
        finally:
            _index.reset(token)

    _replace(worker, "_run_agent_loop", run)


def wrap_client(module: types.ModuleType) -> None:
    """What the client sends to the balancer carries the place.

    Raises:
        UnsupportedFeature: this verl has no such method.
    """
    original, client = _method(module, "_acquire_server")
    if original is None:
        return

    @functools.wraps(original)
    async def acquire(self: Any, request_id: str, **extra: Any) -> Any:
        place = _index.get()
        # A loop of V1 passes priority 0 for every sample, so what verl knows goes before what the loop says.
        return await original(self, request_id, **extra | ({} if place is None else {"priority": place}))

    _replace(client, "_acquire_server", acquire)


_CLASSES = {LOOPS: "AgentLoopWorker", CLIENT: "LLMServerClient"}


def _method(module: types.ModuleType, name: str) -> tuple[Any, Any]:
    owner = getattr(module, _CLASSES[module.__name__], None)
    original = getattr(owner, name, None)
    if original is None:
        raise UnsupportedFeature(f"{module.__name__}.{_CLASSES[module.__name__]} has no {name}; verl 0.9.1 was tested")
    return (None if getattr(original, _MARK, False) else original), owner


def _replace(owner: Any, name: str, method: Any) -> None:
    setattr(method, _MARK, True)
    setattr(owner, name, method)


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``patch`` with a module once its import is done."""

    def __init__(self, name: str, patch: Patch) -> None:
        self.name = name
        self._patch = patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with our step after its execution."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenPatch(spec.loader, self._patch)
        return spec


class _ThenPatch(importlib.abc.Loader):
    def __init__(self, loader: Any, patch: Patch) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        created: types.ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)
