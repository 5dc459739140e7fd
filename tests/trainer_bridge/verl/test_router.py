"""Routing, burial and failover, with stand-ins for Ray's handles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from rollout.errors import ReplicaUnavailable, UnsupportedFeature
from trainer_bridge.verl.router import FailoverHandle, Router
from trainer_bridge.verl.seeds import derive_seed


class Method:
    """``handle.method.remote(...)`` as an awaitable."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        async def run() -> Any:
            result = self._call(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.ensure_future(run())


class Server:
    """A server that answers with its tag's seed, until it dies."""

    def __init__(self, name: str) -> None:
        self.name, self.alive, self.step, self.calls = name, True, 0, 0
        self.stop_reason = "completed"
        self.error: Exception = ActorDiedError()
        self.get_global_steps = Method(self._steps)
        self.generate = Method(self._generate)

    def _steps(self) -> int:
        if not self.alive:
            raise self.error
        return self.step

    def _generate(self, *, zerodrift_tag: Any, **arguments: Any) -> Any:
        self.calls += 1
        if not self.alive:
            raise self.error
        return SimpleNamespace(token_ids=[derive_seed(0, zerodrift_tag)], stop_reason=self.stop_reason, by=self.name)


class Handle:
    """An actor handle of a plain object."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._target, name))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Router, dict[str, Server]]:
    servers = {name: Server(name) for name in ("a", "b")}
    router = Router(servers, {})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=Handle(router)))
    return router, servers


async def call(router: Router, request: str, prompt: list[int], priority: int | None = 0) -> Any:
    """As verl's client does: acquire, generate, release."""
    server_id, handle = await router.acquire_server(request, prompt_ids=prompt, priority=priority)
    try:
        return await handle.generate.remote(prompt_ids=prompt)
    finally:
        router.release_server(server_id)


async def test_verls_client_is_asked_for_what_identifies_a_sample(pair: Any) -> None:
    router, _ = pair
    assert router.require_acquire_fields() == ["prompt_ids", "priority"] and router.require_release_fields() == []
    assert sorted(router.get_all_servers()) == ["a", "b"]


async def test_least_loaded_and_sticky(pair: Any) -> None:
    router, _ = pair
    first, _ = await router.acquire_server("r1", [5])
    second, _ = await router.acquire_server("r2", [5])
    assert {first, second} == {"a", "b"}
    again, _ = await router.acquire_server("r1", [5, 6])
    assert again == first and router.get_inflight_count(first) == 2 and router.get_total_inflight() == 3


@pytest.mark.parametrize(
    "error", [ActorDiedError(), ReplicaUnavailable("the service is gone")], ids=["actor", "service"]
)
async def test_k9_a_server_that_dies_in_a_call_is_replaced_with_the_same_seed(pair: Any, error: Exception) -> None:
    router, servers = pair
    want = (await call(router, "x", [5], priority=3)).token_ids
    server_id, handle = await router.acquire_server("y", prompt_ids=[5], priority=4)
    servers[server_id].alive, servers[server_id].error = False, error
    output = await handle.generate.remote(prompt_ids=[5])
    router.release_server(server_id)
    other = "b" if server_id == "a" else "a"
    assert output.by == other and output.token_ids != want
    await asyncio.sleep(0)
    assert router.get_status()["dead"].keys() == {server_id} and router.get_status()["servers"] == {other: 0}


async def test_a_dead_server_is_never_handed_out(pair: Any) -> None:
    router, servers = pair
    servers["a"].alive = False
    for i in range(4):
        assert (await call(router, f"r{i}", [5])).by == "b"
    assert servers["a"].calls == 0 and router.get_all_servers() == ["b"]
    servers["b"].alive = False
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        await router.acquire_server("r9", [5])
    servers["a"].alive = True
    router.add_servers({"a": servers["a"]})
    assert (await call(router, "r10", [5])).by == "a"


async def test_errors_of_the_request_are_not_failed_over(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    router, servers = pair
    for server in servers.values():
        monkeypatch.setattr(server, "generate", Method(lambda **_: _raise(UnsupportedFeature("no"))))
    with pytest.raises(UnsupportedFeature):
        await call(router, "r", [5])
    assert len(router.get_all_servers()) == 2


def _raise(error: Exception) -> None:
    raise error


async def test_an_aborted_turn_is_resumed_with_its_seed(pair: Any) -> None:
    router, servers = pair
    for server in servers.values():
        server.stop_reason = "aborted"
    first = (await call(router, "r", [5])).token_ids
    for server in servers.values():
        server.stop_reason, server.step = "completed", 1
    assert (await call(router, "r", [5, 9])).token_ids == first
    assert (await call(router, "r", [5, 9, 10])).token_ids != first


async def test_replicas_do_not_enter_the_seed(pair: Any) -> None:
    router, servers = pair
    alone = Router({"b": servers["b"]}, {})
    wanted = [(await call(router, f"r{i}", [5], priority=i)).token_ids for i in range(6)]
    assert [(await call(alone, f"q{i}", [5], priority=i)).token_ids for i in range(6)] == wanted
    assert len({tuple(ids) for ids in wanted}) == 6


def test_the_handle_pickles() -> None:
    import pickle

    from trainer_bridge.verl.seeds import SampleTag

    handle = FailoverHandle("a", None, None, "r", SampleTag(0, "", 0, 0, 0))
    assert pickle.loads(pickle.dumps(handle)).generate is not None
