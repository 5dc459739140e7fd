"""Bad input over the wire: a typed status that names the field, and a server that goes on bit-equal for others (K2)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from rollout.v1 import rollout_pb2 as pb
from rollout.v1 import rollout_pb2_grpc
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving

NAN = float("nan")
SEED = pb.SamplingParams(seed=1, max_tokens=6)


def generate(ids: list[int] | None = None, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=[1] if ids is None else ids), **fields)


def sampling(**fields: Any) -> pb.GenerateRequest:
    return generate(sampling=pb.SamplingParams(**fields))


def score(ids: list[int], **fields: Any) -> pb.ScoreRequest:
    return pb.ScoreRequest(sequences=[pb.ScoreSequence(tokens=pb.TokenIds(ids=ids), **fields)])


def odd(message: Any, part: Any = None) -> Any:
    (message if part is None else part).MergeFromString(b"\x98\x06\x01")
    return message


def odd_part(message: Any, name: str) -> Any:
    return odd(message, getattr(message, name))


BAD: list[tuple[str, Any, str]] = [
    ("Generate", pb.GenerateRequest(), "prompt"),
    ("Generate", generate([]), "prompt.tokens.ids"),
    ("Generate", pb.GenerateRequest(text=""), "prompt.text"),
    ("Generate", pb.GenerateRequest(text=" \n"), "prompt.text"),
    ("Generate", generate([-1]), "prompt.tokens.ids[0]"),
    ("Generate", generate([5, 2**31]), "prompt.tokens.ids[1]"),
    ("Generate", generate([2**63 - 1]), "prompt.tokens.ids[0]"),
    ("Generate", generate([64]), "prompt"),
    ("Generate", generate([1] * 256), "prompt"),
    ("Generate", generate(n=0), "n"),
    ("Generate", generate(n=-2), "n"),
    ("Generate", generate(sample_index=-1), "sample_index"),
    ("Generate", sampling(top_p=0), "sampling.top_p"),
    ("Generate", sampling(top_p=1.1), "sampling.top_p"),
    ("Generate", sampling(top_p=NAN), "sampling.top_p"),
    ("Generate", sampling(min_p=1), "sampling.min_p"),
    ("Generate", sampling(min_p=-0.1), "sampling.min_p"),
    ("Generate", sampling(top_k=-2), "sampling.top_k"),
    ("Generate", sampling(max_tokens=0), "sampling.max_tokens"),
    ("Generate", sampling(max_tokens=-1), "sampling.max_tokens"),
    ("Generate", sampling(stop=[""]), "sampling.stop"),
    ("Generate", sampling(stop_token_ids=[-1]), "sampling.stop_token_ids"),
    ("Generate", odd(generate()), "99"),
    ("Generate", odd_part(sampling(seed=1), "sampling"), "sampling.99"),
    ("Generate", odd_part(generate(), "tokens"), "tokens.99"),
    ("Score", pb.ScoreRequest(), "sequences"),
    ("Score", score([]), "sequences[0].tokens.ids"),
    ("Score", score([1]), "sequences[0].tokens.ids"),
    ("Score", score([1, -1]), "sequences[0].tokens.ids[1]"),
    ("Score", score([1, 64]), "sequences"),
    ("Score", score([1, 2], start=0), "sequences[0].start"),
    ("Score", score([1, 2], start=2), "sequences[0].start"),
    *(
        (method, request, field)
        for value in (NAN, float("inf"), -1.0, 1e39, 1e308, 1e-7, 1e-50, 5e-324)
        for method, request, field in (
            ("Generate", sampling(temperature=value), "sampling.temperature"),
            ("Score", pb.ScoreRequest(sequences=score([1, 2]).sequences, temperature=value), "temperature"),
        )
    ),
    ("Score", odd(score([1, 2])), "99"),
    ("GetServerInfo", odd(pb.GetServerInfoRequest()), "99"),
    ("Pause", odd(pb.PauseRequest()), "99"),
    ("Resume", odd(pb.ResumeRequest()), "99"),
    ("Abort", odd(pb.AbortRequest(all=True)), "99"),
    ("Abort", pb.AbortRequest(), "request_id"),
]


@pytest.fixture
async def stub() -> AsyncIterator[Any]:
    async with serving(FakeBackend()) as server, grpc.aio.insecure_channel(address(server)) as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


async def answer(stub: Any, method: str, request: Any) -> list[bytes]:
    call = getattr(stub, method)(request, timeout=20)
    if method == "Generate":
        return [message.SerializeToString(deterministic=True) async for message in call]
    return [(await call).SerializeToString(deterministic=True)]


async def good(stub: Any, seed: int = 1) -> list[bytes]:
    params = pb.SamplingParams(seed=seed, max_tokens=6)
    generated = await answer(stub, "Generate", generate([3, 4], request_id="good", sampling=params, n=2))
    return generated + await answer(stub, "Score", pb.ScoreRequest(request_id="s", sequences=score([1, 2]).sequences))


async def refused(stub: Any, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(stub, method, request)
    bad = error_details_pb2.BadRequest()
    status = rpc_status.from_call(caught.value)
    assert status is not None, caught.value
    fields = [bad.field_violations[0].field for detail in status.details if detail.Unpack(bad)]
    assert len(fields) == 1
    return caught.value.code(), fields[0]


async def test_each_is_refused_by_name_and_the_next_call_is_bit_equal(stub: Any) -> None:
    before = await good(stub)
    for method, request, field in BAD:
        assert await refused(stub, method, request) == (grpc.StatusCode.INVALID_ARGUMENT, field), request
        assert await good(stub) == before, f"after {method} {request}"
    assert await good(stub, seed=2) != before, "control: another seed"


async def test_the_same_requests_without_the_fault_are_served(stub: Any) -> None:
    """Control: it is the fault that is refused."""
    assert await answer(stub, "Generate", generate([1] * 255, sampling=SEED))
    assert await answer(stub, "Generate", generate([63], sampling=pb.SamplingParams(top_k=-1, max_tokens=1)))
    assert await answer(stub, "Generate", pb.GenerateRequest(text="a", sampling=SEED))
    assert await answer(stub, "Score", score([1, 63], start=1))
    for method in ("GetServerInfo", "Pause", "Resume"):
        assert await answer(stub, method, getattr(pb, f"{method}Request")())


async def test_bytes_that_are_no_message() -> None:
    """Refused by grpc itself, before the service; the server goes on."""
    async with serving(FakeBackend()) as server, grpc.aio.insecure_channel(address(server)) as channel:
        own: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        before = await good(own)
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/rollout.v1.RolloutService/Score")(b"\xff\xff\xff")
        assert await good(own) == before
