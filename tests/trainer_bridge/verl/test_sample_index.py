"""The place of a sample reaches the balancer, whatever loop runs; with stand-ins for verl's two modules."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollout.errors import UnsupportedFeature
from trainer_bridge.verl import sample_index

CLIENT = """
class LLMServerClient:
    async def _acquire_server(self, request_id, **extra):
        return request_id, extra
"""
LOOPS = """
class AgentLoopWorker:
    async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, trace=True, **kwargs):
        return await self.loop(**kwargs)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    names = ("fake_verl_loops", "fake_verl_client")
    for name, text in zip(names, (LOOPS, CLIENT), strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sample_index, "LOOPS", names[0])
    monkeypatch.setattr(sample_index, "CLIENT", names[1])
    monkeypatch.setattr(sample_index, "_CLASSES", {names[0]: "AgentLoopWorker", names[1]: "LLMServerClient"})
    before = list(sys.meta_path)
    yield names
    sys.meta_path[:] = before
    for name in names:
        sys.modules.pop(name, None)


def loaded(names: tuple[str, str]) -> tuple[ModuleType, ModuleType]:
    loops, client = (importlib.import_module(name) for name in names)
    return loops, client


async def fields(loops: ModuleType, client: ModuleType, said: dict[str, Any], **known: Any) -> dict[str, Any]:
    """What the balancer is sent when verl knows ``known`` and the loop says ``said``."""

    class Worker(loops.AgentLoopWorker):  # type: ignore[name-defined, misc]
        async def loop(self, **_: Any) -> Any:
            # As a loop may: in a task of its own.
            return await asyncio.create_task(client.LLMServerClient()._acquire_server("r", prompt_ids=[1], **said))

    _, sent = await Worker()._run_agent_loop({}, {}, agent_name="a", **known)
    return dict(sent)


@pytest.mark.parametrize("first", ["install", "import"])
async def test_what_verl_knows_goes_before_what_a_loop_says(modules: tuple[str, str], first: str) -> None:
    if first == "import":
        loaded(modules)
    sample_index.install()
    sample_index.install()
    loops, client = loaded(modules)
    assert (await fields(loops, client, {}, priority=7))["priority"] == 7, "a tool loop of V0 drops it"
    assert (await fields(loops, client, {"priority": 0}, session_id=3))["priority"] == 3, "V1 passes 0 for all"
    assert (await fields(loops, client, {"priority": 5}))["priority"] == 5, "nothing known: what the loop says"
    assert "priority" not in await fields(loops, client, {})
    assert "priority" not in (await client.LLMServerClient()._acquire_server("r"))[1], "nothing stays behind"


async def test_loops_side_by_side_keep_their_own_place(modules: tuple[str, str]) -> None:
    sample_index.install()
    loops, client = loaded(modules)
    sent = await asyncio.gather(*(fields(loops, client, {}, session_id=i) for i in range(8)))
    assert [one["priority"] for one in sent] == list(range(8))


def test_wrapping_twice_changes_nothing_and_another_verl_is_refused(modules: tuple[str, str]) -> None:
    sample_index.install()
    loops, client = loaded(modules)
    before = client.LLMServerClient._acquire_server
    sample_index.wrap_client(client)
    assert client.LLMServerClient._acquire_server is before
    del loops.AgentLoopWorker._run_agent_loop
    with pytest.raises(UnsupportedFeature, match="has no _run_agent_loop"):
        sample_index.wrap_loops(loops)
