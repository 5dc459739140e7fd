"""Whose share a call uses: the name in its metadata, else where it comes from."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from rollout import codec
from rollout.errors import InvalidRequest
from rollout.interceptors import client_of
from rollout.types import GenerateRequest, SamplingParams, ScoreSequence
from rollout.v1 import rollout_pb2_grpc
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.client import RolloutClient

SAMPLING = SamplingParams(seed=1, max_tokens=2)


async def test_named_clients_are_told_apart_and_others_go_by_address() -> None:
    backend = FakeBackend()
    async with serving(backend) as server:
        for client_id in ("trainer-0", "trainer-1", ""):
            async with AsyncRolloutClient(address(server), client_id=client_id) as client:
                await client.generate([3], SAMPLING, priority=4)
                await client.score([ScoreSequence((3, 4))], priority=-4)
    told = [(request.client, request.priority) for request in backend.seen]
    assert told[:4] == [("trainer-0", 4), ("trainer-0", -4), ("trainer-1", 4), ("trainer-1", -4)]
    assert told[4:] == [("ipv4:127.0.0.1", 4), ("ipv4:127.0.0.1", -4)]


@pytest.mark.parametrize("name", ["two words", "x" * 129, "ü"])
def test_a_name_that_no_header_holds_is_refused_by_the_client(name: str) -> None:
    with RolloutClient("127.0.0.1:1", client_id=name) as client, pytest.raises(InvalidRequest, match="client_id"):
        client.generate([3], SAMPLING)


async def test_an_odd_name_from_elsewhere_counts_as_none() -> None:
    backend = FakeBackend()
    message = codec.generate_request_to_proto(GenerateRequest("x", (3,), SAMPLING))
    async with serving(backend) as server, grpc.aio.insecure_channel(address(server)) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        async for _ in stub.Generate(message, metadata=(("x-client-id", "two words"),)):
            pass
    assert backend.seen[0].client == "ipv4:127.0.0.1"


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:10.0.0.7:4411", "ipv4:10.0.0.7"),
        ("ipv6:%5B::1%5D:4411", "ipv6:%5B::1%5D"),
        ("unix:/tmp/socket:1", "unix:/tmp/socket:1"),
        ("odd", "odd"),
    ],
)
def test_the_port_of_a_peer_does_not_count(peer: str, client: str) -> None:
    class Context:
        def invocation_metadata(self) -> Any:
            return None

        def peer(self) -> str:
            return peer

    assert client_of(Context()) == client  # type: ignore[arg-type]
