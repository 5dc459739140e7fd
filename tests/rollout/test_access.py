"""Tokens, roles, and whose call it is; over a real server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from rollout import access
from rollout.access import ROLES, TokenFile, new_token, required_role
from rollout.call_scope import Role
from rollout.config import ServerSettings
from rollout.errors import ConfigError, NotFound, PermissionDenied, RolloutError, Unauthenticated
from rollout.types import SamplingParams
from rollout.v1 import debug_pb2, rollout_pb2
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.client import RolloutClient
from trainer_bridge.wire.channel import ClientSecurity

SAMPLING = SamplingParams(seed=1, max_tokens=4)


class Tokens:
    """A tokens file and the tokens in it, by name."""

    def __init__(self, path: Path, **roles: str) -> None:
        self.path, self.of, self._lines = path, {}, {}
        for name, role in roles.items():
            self.of[name], self._lines[name] = new_token(name, Role(role))
        self.write(*roles)

    def write(self, *names: str) -> None:
        text = "# who may call\n\n" + "".join(f"{self._lines[name]}  # a comment\n" for name in names)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, self.path)

    def client(self, where: str, name: str, **options: Any) -> AsyncRolloutClient:
        return AsyncRolloutClient(where, security=ClientSecurity(token=self.of.get(name, name)), **options)

    @property
    def settings(self) -> ServerSettings:
        return ServerSettings(tokens=str(self.path))


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "tokens", trainer="control", actor="generate", other="generate")


def test_every_method_has_a_role_and_the_unknown_needs_the_highest() -> None:
    services = [
        rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
        debug_pb2.DESCRIPTOR.services_by_name["DebugService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    ]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods - ROLES.keys() == set(), "say in rollout/access.py what role it needs"
    assert required_role("/rollout.v1.RolloutService/Tomorrow") is Role.CONTROL
    open_to_all = {name.rpartition("/")[2] for name, role in ROLES.items() if role is None}
    assert open_to_all == {"Check", "List"}, "short, and nothing that changes or tells"


async def outcome(call: Any) -> str:
    try:
        await call
    except RolloutError as error:
        return type(error).__name__
    return "served"


@pytest.mark.parametrize(
    ("name", "generates", "controls"),
    [
        ("trainer", "served", "served"),
        ("actor", "served", "PermissionDenied"),
        ("not-a-token", "Unauthenticated", "Unauthenticated"),
    ],
)
async def test_what_each_role_may(tokens: Tokens, name: str, generates: str, controls: str) -> None:
    backend = FakeBackend()
    async with serving(backend, settings=tokens.settings) as server, tokens.client(address(server), name) as client:
        assert await outcome(client.generate([3], SAMPLING)) == generates
        assert await outcome(client.info()) == generates
        for call in (
            client.info(tensor_digests=True),
            client.pause(),
            client.resume(),
            client.abort(all_requests=True),
        ):
            assert await outcome(call) == controls
        update = client.update_weights([("a", np.zeros(2, np.float32))], version=2, digest="ab")
        assert await outcome(update) == controls
    assert backend.weights.version == (2 if controls == "served" else 1)


async def test_without_a_token_nothing_but_a_probe_is_answered(tokens: Tokens) -> None:
    backend = FakeBackend()
    async with serving(backend, settings=tokens.settings) as server, AsyncRolloutClient(address(server)) as client:
        assert await outcome(client.generate([3], SAMPLING)) == "Unauthenticated"
        async with grpc.aio.insecure_channel(address(server)) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1
    assert backend.seen == []


async def test_made_up_methods_reach_neither_audit_nor_metrics(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        async with serving(FakeBackend(), settings=tokens.settings) as server:  # noqa: SIM117
            async with grpc.aio.insecure_channel(address(server)) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/rollout.v1.RolloutService/MadeUp")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "MadeUp" not in caplog.text


@pytest.mark.parametrize(
    "headers",
    [
        lambda good: (("authorization", good), ("authorization", good)),
        lambda good: (("authorization", good.replace("Bearer", "Basic")),),
        lambda good: (("authorization", good.removeprefix("Bearer ")),),
        lambda good: (("authorization", good + "x"),),
        lambda good: (("authorization", good[:-1]),),
        lambda good: (("authorization", ""),),
        lambda good: (("authorization-bin", good.encode()),),
    ],
)
async def test_headers_that_are_not_quite_right(tokens: Tokens, headers: Any) -> None:
    request = rollout_pb2.GetServerInfoRequest().SerializeToString()
    good = f"Bearer {tokens.of['trainer']}"
    async with serving(FakeBackend(), settings=tokens.settings) as server:  # noqa: SIM117
        async with grpc.aio.insecure_channel(address(server)) as channel:
            method = channel.unary_unary("/rollout.v1.RolloutService/GetServerInfo")
            assert await method(request, metadata=(("authorization", good),)), "control"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(request, metadata=headers(good))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert tokens.of["trainer"] not in str(caught.value)


async def test_the_caller_is_the_token_whatever_name_is_given(tokens: Tokens) -> None:
    backend = FakeBackend()
    async with serving(backend, settings=tokens.settings) as server:
        for client_id in ("", "actor"):
            async with tokens.client(address(server), "actor", client_id=client_id) as client:
                await client.generate([3], SAMPLING)
        async with tokens.client(address(server), "actor", client_id="other") as client:
            with pytest.raises(PermissionDenied, match="actor"):
                await client.generate([3], SAMPLING)
    assert [request.client for request in backend.seen] == ["actor", "actor"]


async def test_one_ends_only_ones_own_requests(tokens: Tokens) -> None:
    backend = FakeBackend()
    backend.hold()
    async with serving(backend, settings=tokens.settings) as server:
        where = address(server)
        async with tokens.client(where, "actor") as actor, tokens.client(where, "other") as other:
            live = asyncio.create_task(actor.generate([3], SAMPLING, request_id="mine"))
            await asyncio.wait_for(backend.reached.wait(), 20)
            with pytest.raises(NotFound):
                await other.abort("mine")
            assert backend.aborted == set()
            assert await actor.abort("mine") == 1
            await live
            backend.hold()
            backend.reached.clear()
            live = asyncio.create_task(actor.generate([3], SAMPLING, request_id="mine"))
            await asyncio.wait_for(backend.reached.wait(), 20)
            async with tokens.client(where, "trainer") as trainer:
                assert await trainer.abort("mine") == 1
            await live


async def test_tokens_are_replaced_without_a_restart(tokens: Tokens, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeBackend(), settings=tokens.settings) as server:
        where = address(server)
        async with tokens.client(where, "trainer") as trainer, tokens.client(where, "actor") as actor:
            assert [await outcome(c.info()) for c in (trainer, actor)] == ["served", "served"]
            tokens.write("actor")
            assert [await outcome(c.info()) for c in (trainer, actor)] == ["Unauthenticated", "served"]
            tokens.path.write_text("half a line")
            assert [await outcome(c.info()) for c in (trainer, actor)] == ["Unauthenticated", "served"]
            assert "stay in force" in caplog.text and "half" not in caplog.text
            tokens.path.unlink()
            assert await outcome(actor.info()) == "served"
            tokens.write("trainer")
            assert [await outcome(c.info()) for c in (trainer, actor)] == ["served", "Unauthenticated"]


async def test_a_client_reads_its_token_for_every_call(tokens: Tokens, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text(tokens.of["other"] + "\n")
    async with serving(FakeBackend(), settings=tokens.settings) as server:
        with RolloutClient(address(server), security=ClientSecurity(token_file=mine)) as client:
            await asyncio.to_thread(client.info)
            with pytest.raises(PermissionDenied, match="control"):
                await asyncio.to_thread(client.pause)
            mine.write_text(tokens.of["trainer"])
            await asyncio.to_thread(client.pause)
            mine.write_text("none of them")
            with pytest.raises(ConfigError, match="token"):
                await asyncio.to_thread(client.info)
            mine.write_text("none")
            with pytest.raises(Unauthenticated):
                await asyncio.to_thread(client.info)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no token"),
        ("# nobody\n", "holds no token"),
        ("a control sha256:12", "line 1"),
        ("a root sha256:" + "0" * 64, "generate|control"),
        ("# x\na control sha256:" + "0" * 64 + " more", "line 2"),
        ("ü control sha256:" + "0" * 64, "line 1"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        TokenFile(path)
    assert says in caught.value.message and caught.value.field == "server.tokens"
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenFile(tmp_path / "absent")


def test_a_file_that_everyone_may_write_is_refused(tokens: Tokens) -> None:
    TokenFile(tokens.path)
    tokens.path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        TokenFile(tokens.path)


def test_every_entry_is_compared_whichever_matches(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TokenFile(tokens.path)
    compared: list[object] = []
    real = access.Secret.matches
    monkeypatch.setattr(access.Secret, "matches", lambda self, token: compared.append(self) or real(self, token))
    for name in ("trainer", "actor", "other", "nobody"):
        compared.clear()
        caller = file.caller_of(tokens.of.get(name, name))
        assert (caller.name if caller else "nobody") == name and len(compared) == 3


def test_a_pasted_token_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("trainer control my-secret-token")
    with pytest.raises(ConfigError) as caught:
        TokenFile(path)
    assert "my-secret-token" not in caught.value.message


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "a#b"])
def test_names_that_no_line_holds(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        new_token(name, Role.CONTROL)
