"""A full service refuses before it reads, lets resumed calls and everything else pass, and tells strangers nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from rollout.access import new_token
from rollout.admission import AdmittingBackend
from rollout.call_scope import Role
from rollout.config import ServerSettings, Settings
from rollout.errors import CapacityExceeded
from rollout.metrics import NoMeter
from rollout.types import GenerateRequest, SamplingParams
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from tests.hostile.prober import retry_of

SERVICE = "/rollout.v1.RolloutService/"
FULL = CapacityExceeded("7 samples are live and 1 more asked for; try again later")


async def refusal(where: str, method: str, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.aio.AioRpcError:
    """How a call ends whose message never comes: only the door, or what stands before it, can end it."""
    async with grpc.aio.insecure_channel(where) as channel:
        call = channel.stream_stream(SERVICE + method)(timeout=20, metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return caught.value


@pytest.mark.parametrize("method", ["Generate", "Score"])
async def test_refused_before_a_byte_is_read(method: str) -> None:
    backend = FakeBackend()
    async with serving(backend, no_room=lambda client, name: FULL) as server:
        error = await refusal(address(server), method)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_of(error)
        assert "7 samples are live" in str(error.details())
        # Whoever asks for no samples is served.
        async with grpc.aio.insecure_channel(address(server)) as channel:
            await channel.unary_unary(SERVICE + "GetServerInfo")(b"", timeout=20)
    assert backend.seen == []


async def test_with_room_the_message_is_waited_for() -> None:
    """Control: without a refusal the same call ends for want of its message."""
    settings = ServerSettings(receive_timeout_s=0.2)
    async with serving(FakeBackend(), settings=settings, no_room=lambda client, name: None) as server:
        error = await refusal(address(server), "Generate")
    assert error.code() is grpc.StatusCode.ABORTED and "server.receive_timeout_s" in str(error.details())


async def test_strangers_are_not_told_how_full_it_is(tmp_path: Path) -> None:
    token, line = new_token("someone", Role.GENERATE)
    (tmp_path / "tokens").write_text(line)
    asked: list[tuple[str, str]] = []

    def no_room(client: str, name: str) -> CapacityExceeded:
        asked.append((client, name))
        return FULL

    settings = ServerSettings(tokens=str(tmp_path / "tokens"))
    async with serving(FakeBackend(), settings=settings, no_room=no_room) as server:
        assert (await refusal(address(server), "Generate")).code() is grpc.StatusCode.UNAUTHENTICATED
        assert asked == []
        known = (("authorization", f"Bearer {token}"), ("x-request-id", "r-1"))
        error = await refusal(address(server), "Generate", known)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and asked == [("someone", "r-1")]


async def test_a_live_name_has_room_for_its_successor() -> None:
    """A call that resumes a lost stream takes over the one that the gateway still holds, however full it is."""
    settings = Settings.model_validate({"engine": {"max_running": 1, "max_waiting": 1, "max_waiting_per_client": 1}})
    backend = FakeBackend()
    backend.hold()
    inner: Any = backend
    admitting = AdmittingBackend(inner, NoMeter(), settings)
    assert admitting.no_room("b", "x") is None
    sampling = SamplingParams(seed=1, max_tokens=4)

    async def read(name: str) -> int:
        return len([e async for e in admitting.generate(GenerateRequest(name, (3,), sampling, n=2, client="a"))])

    live = asyncio.create_task(read("one"))
    await asyncio.wait_for(backend.reached.wait(), 20)
    assert admitting.no_room("b", "one") is None
    assert "2 samples are live" in str(admitting.no_room("b", "two"))
    backend.gate.set()
    assert await live
    assert admitting.no_room("b", "two") is None and admitting._names == set()
