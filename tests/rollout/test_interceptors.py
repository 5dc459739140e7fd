"""Errors of every kind of call, on a real server whose methods are plain bytes in, bytes out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from rollout.errors import (
    CapacityExceeded,
    ConfigError,
    DuplicateRequest,
    InvalidRequest,
    NotFound,
    ParityError,
    ReplicaUnavailable,
    RequestAborted,
    RolloutError,
    UnsupportedFeature,
    WeightUpdateError,
)
from rollout.interceptors import (
    ErrorInterceptor,
    GuardInterceptor,
    current_request_id,
    standard_interceptors,
    status_of,
)

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
# A call that ends while its client still writes may show grpc.aio's "Internal error from Core" instead of its status.
REFUSED_AT_ONCE = ("unary_unary", "unary_stream")
ALL_ERRORS = [
    CapacityExceeded,
    ConfigError,
    DuplicateRequest,
    InvalidRequest,
    NotFound,
    ParityError,
    ReplicaUnavailable,
    RequestAborted,
    RolloutError,
    UnsupportedFeature,
    WeightUpdateError,
]

Step = Callable[[], Awaitable[bytes]]


class Methods(grpc.GenericRpcHandler):
    """One method of each kind, all of which run ``step``; "writer" streams by ``context.write``."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.closed = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = handler_call_details.method.rpartition("/")[2]
        if name == "writer":
            return grpc.unary_stream_rpc_method_handler(self.writer)
        make = getattr(grpc, f"{name}_rpc_method_handler", None)
        return make and make(self.stream if name.endswith("_stream") else self.unary)

    async def unary(self, request: Any, context: Any) -> bytes:
        if not isinstance(request, bytes):
            async for _ in request:
                pass
        return await self.step()

    async def stream(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            yield await self.step()
        finally:
            self.closed.set()

    async def writer(self, request: Any, context: Any) -> None:
        await context.write(await self.step())


@asynccontextmanager
async def methods(step: Step, *inner: grpc.aio.ServerInterceptor) -> AsyncIterator[tuple[Methods, grpc.aio.Channel]]:
    handlers = Methods(step)
    server = grpc.aio.server(handlers=[handlers], interceptors=standard_interceptors(*inner))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield handlers, channel
    finally:
        await server.stop(None)


async def call(channel: grpc.aio.Channel, kind: str, metadata: tuple[tuple[str, str], ...] = ()) -> list[bytes]:
    request = b"" if kind.startswith("unary") or kind == "writer" else iter([b"", b""])
    shape = "unary_stream" if kind == "writer" else kind
    made = getattr(channel, shape)(f"/test/{kind}")(request, metadata=metadata, timeout=20)
    if shape.endswith("_unary"):
        return [await made]
    return [message async for message in made]


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    status = rpc_status.from_call(error)
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            message = kind()
            if packed.Unpack(message):
                found[kind.__name__] = message
    return found


def raising(error: Exception) -> Step:
    async def step() -> bytes:
        raise error

    return step


async def good() -> bytes:
    return b"good"


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_that_succeed_are_untouched(kind: str) -> None:
    async with methods(good) as (_, channel):
        expected = [b"first", b"good"] if kind.endswith("_stream") else [b"good"]
        assert await call(channel, kind) == expected
        assert await call(channel, "writer") == [b"good"]


@pytest.mark.parametrize("kind", [*KINDS, "writer"])
async def test_typed_error_of_every_kind_of_call(kind: str) -> None:
    async with methods(raising(InvalidRequest("n = 0 must be >= 1", field="n"))) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "n = 0 must be >= 1"
    found = details(caught.value)
    assert (found["ErrorInfo"].reason, found["ErrorInfo"].domain) == ("INVALID_REQUEST", "rollout")
    assert found["BadRequest"].field_violations[0].field == "n"
    assert "RetryInfo" not in found


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda kind: kind.__name__)
async def test_every_class_keeps_its_code_and_reason(error: type[RolloutError]) -> None:
    async with methods(raising(error("what", field="f"))) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary")
    found = details(caught.value)
    assert caught.value.code().name == error.code
    assert found["ErrorInfo"].reason == error.reason
    # The root says INTERNAL, and nothing of what is internal: an id, as for any unforeseen error.
    hidden = error is RolloutError
    assert found["ErrorInfo"].metadata["field"] == ("" if hidden else "f")
    assert str(caught.value.details()).startswith("internal error, id=" if hidden else "what")
    assert ("RetryInfo" in found) == (error is CapacityExceeded)
    assert ("BadRequest" in found) == issubclass(error, InvalidRequest)


@pytest.mark.parametrize("kind", [*KINDS, "writer"])
async def test_unforeseen_errors_leak_nothing(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with methods(raising(ValueError("secret"))) as (_, channel):
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, (("x-request-id", "call-7"),))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error, id=call-7"
    everything = f"{caught.value!r}{caught.value.trailing_metadata()}{caught.value.debug_error_string()}"
    assert "secret" not in everything
    assert "ValueError" not in everything
    records = [record for record in caplog.records if record.name == "rollout.interceptors"]
    assert len(records) == 1
    assert "call-7" in records[0].getMessage()
    assert records[0].exc_info is not None
    assert "secret" in str(records[0].exc_info[1])


async def test_request_id_is_taken_made_or_replaced_and_does_not_stay() -> None:
    seen: list[str] = []

    async def step() -> bytes:
        assert structlog.contextvars.get_contextvars()["request_id"] == current_request_id()
        seen.append(current_request_id())
        return b""

    async with methods(step) as (_, channel):
        await call(channel, "unary_unary", (("x-request-id", "mine"),))
        await call(channel, "unary_stream")
        await call(channel, "unary_unary")
        await call(channel, "unary_unary", (("x-request-id", "two words"),))
        await call(channel, "unary_unary", (("x-request-id", "x" * 129),))
    assert seen[0] == "mine"
    assert len(set(seen)) == 5, "each call has its own"
    assert all(len(made) == 16 for made in seen[1:])
    assert current_request_id() == ""


async def test_cancel_passes_and_closes_the_stream() -> None:
    waiting = asyncio.Event()

    async def step() -> bytes:
        waiting.set()
        await asyncio.Event().wait()
        return b""

    async with methods(step) as (handlers, channel):
        made: Any = channel.unary_stream("/test/unary_stream")(b"")
        assert await made.read() == b"first"
        await waiting.wait()
        assert not handlers.closed.is_set()
        made.cancel()
        await asyncio.wait_for(handlers.closed.wait(), 10)
        with pytest.raises(asyncio.CancelledError):
            await made.read()


async def test_unknown_methods_stay_unimplemented() -> None:
    async with methods(good) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test/nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


class Doorkeeper(GuardInterceptor):
    """Stands where authentication will."""

    @asynccontextmanager
    async def guard(self, details: grpc.HandlerCallDetails, context: Any) -> AsyncIterator[None]:
        if ("authorization", "yes") not in (details.invocation_metadata or ()):
            raise UnsupportedFeature(f"no entry, id={current_request_id()}")
        yield


@pytest.mark.parametrize("kind", REFUSED_AT_ONCE)
async def test_an_inner_guard_can_refuse_with_a_typed_error(kind: str) -> None:
    async with methods(good, Doorkeeper()) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, (("x-request-id", "r"),))
        assert caught.value.details() == "no entry, id=r"
        assert (await call(channel, kind, (("authorization", "yes"),)))[-1] == b"good"


class Aborting(GuardInterceptor):
    """Ends the call by grpc's own means."""

    @asynccontextmanager
    async def guard(self, details: grpc.HandlerCallDetails, context: Any) -> AsyncIterator[None]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        yield


@pytest.mark.parametrize("kind", REFUSED_AT_ONCE)
async def test_an_abort_passes(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with methods(good, Aborting()) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAUTHENTICATED, "no token")
    assert [record for record in caplog.records if record.name == "rollout.interceptors"] == []


@pytest.mark.parametrize("message", ["x" * 100_000, "値" * 5_000, "\ud800" * 2_000, "\n\0%" * 2_000])
async def test_long_and_odd_messages_arrive_cut(message: str) -> None:
    async with methods(raising(InvalidRequest(message, field="f" * 10_000))) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    text = caught.value.details() or ""
    assert text.endswith("...")
    assert len(text.encode()) <= 1000
    assert details(caught.value)["ErrorInfo"].reason == "INVALID_REQUEST"


def test_short_messages_are_whole() -> None:
    assert status_of(RolloutError("a" * 1000)).message == "a" * 1000
    assert status_of(RolloutError("a" * 1001)).message == "a" * 997 + "..."


class Ended:
    """A context whose abort ends the call, as grpc.aio's does."""

    async def abort_with_status(self, status: Any) -> None:
        raise grpc.aio.AbortError(status.details)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (grpc._cython.cygrpc._ServerStoppedError("Server already stopped."), False),
        (grpc.aio.InternalError("the client is gone"), False),
        (grpc.aio.AbortError("done"), False),
        (grpc.aio.UsageError("ours"), True),
        (ValueError("ours"), True),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_only_our_own_faults_are_logged_as_such(
    error: Exception, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A stop in the middle of an update's stream was an internal error with a traceback in the log."""
    context: Any = Ended()
    found: Any = grpc.aio.AbortError if told else type(error)
    with caplog.at_level(logging.ERROR), pytest.raises(found):
        async with ErrorInterceptor().guard(SimpleNamespace(method="/x"), context):  # type: ignore[arg-type]
            raise error
    assert bool(caplog.records) == told
