"""Interceptors of the asyncio gRPC server, outside in: request id, errors, then whatever is handed in (authentication).

An interceptor is a guard: an async context manager around one call. ``guarded`` puts it around handlers of every kind,
and closes a handler's stream deterministically, where grpc.aio would leave that to the garbage collector.
"""

from __future__ import annotations

import abc
import asyncio
import inspect
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from rollout.call_scope import current_scope
from rollout.errors import CapacityExceeded, RolloutError
from rollout.retry_pace import EARLIEST_S, RetryPace

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs only

DOMAIN = "rollout"
"""``ErrorInfo.domain``."""
REQUEST_ID_KEY = "x-request-id"
CLIENT_ID_KEY = "x-client-id"
MAX_MESSAGE_BYTES = 1000
"""Status text is cut here: it travels in HTTP/2 trailers, escaped and twice, and peers refuse more than 8 KiB."""

_logger = logging.getLogger(__name__)
_request_id: ContextVar[str] = ContextVar("rollout_request_id", default="")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def current_request_id() -> str:
    """Id of the RPC that this task serves, "" outside of one."""
    return _request_id.get()


def client_of(context: Context) -> str:
    """Whose call this is, for fair shares: the caller that was proven; else metadata ``x-client-id``, on trust; else
    the peer's address without its port."""
    scope = current_scope()
    if scope is not None and scope.caller.name:
        return scope.caller.name
    for key, value in context.invocation_metadata() or ():
        if key == CLIENT_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    peer = str(context.peer())
    # "ipv4:1.2.3.4:50", "ipv6:%5B::1%5D:50", "unix:path"
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0] or peer


class WrappingInterceptor(grpc.aio.ServerInterceptor, abc.ABC):
    """An interceptor that puts something around every handler that there is."""

    @abc.abstractmethod
    def wrapped(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """What answers in the handler's place."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler that the rest of the chain found; None (unknown method) passes through."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self.wrapped(handler, handler_call_details)


class GuardInterceptor(WrappingInterceptor):
    """An interceptor that runs ``guard`` around every call, of every kind."""

    @abc.abstractmethod
    def guard(self, details: grpc.HandlerCallDetails, context: Context) -> AbstractAsyncContextManager[None]:
        """Entered before the handler, left after its last message; may raise ``RolloutError`` or abort the context."""

    def wrapped(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The handler inside of ``guard``."""
        return guarded(handler, lambda context: self.guard(details, context))


def guarded(handler: Handler, guard: Callable[[Context], AbstractAsyncContextManager[None]]) -> Handler:
    """The handler with ``guard`` around each call. Streams are async generators or coroutines that call ``write``."""
    behavior = behavior_of(handler)

    async def respond(request: Any, context: Context) -> Any:
        async with guard(context):
            return await behavior(request, context)

    async def stream(request: Any, context: Context) -> None:
        async with guard(context):
            await write_all(behavior(request, context), context)

    # The stubs of method_handler know synchronous behaviours only.
    make: Callable[..., Handler]
    if handler.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
    else:
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
    return make(
        stream if handler.response_streaming else respond,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


async def write_all(responses: Any, context: Context) -> None:
    """Write what a behaviour made: an async generator's messages, or what a coroutine returns, if anything."""
    if not inspect.isasyncgen(responses):
        # Behaviours that write by themselves return nothing.
        if (response := await responses) is not None:
            await context.write(response)
        return
    async with aclosing(responses):
        async for response in responses:
            await context.write(response)


def behavior_of(handler: Handler) -> Callable[[Any, Context], Any]:
    """The handler's function, whichever kind it is of."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    behavior = next(kind for kind in kinds if kind is not None)
    return behavior  # type: ignore[return-value]  # as above: an aio context


class RequestIdInterceptor(GuardInterceptor):
    """Gives each RPC an id (metadata ``x-request-id``, or a new one) and binds it for logs and error details."""

    @asynccontextmanager
    async def guard(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        """Bind the id for the length of the call."""
        given = next((value for key, value in details.invocation_metadata or () if key == REQUEST_ID_KEY), "")
        valid = isinstance(given, str) and _REQUEST_ID.fullmatch(given)
        # An id that would not survive a log line is replaced rather than quoted.
        request_id = str(given) if valid else secrets.token_hex(8)
        token = _request_id.set(request_id)
        try:
            with structlog.contextvars.bound_contextvars(request_id=request_id):
                yield
        finally:
            _request_id.reset(token)


class ErrorInterceptor(GuardInterceptor):
    """Ends a failed call with a typed status. Texts of unforeseen errors stay in the server's log."""

    def __init__(self) -> None:
        self._pace = RetryPace()

    @asynccontextmanager
    async def guard(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        """Translate what the call raises; cancellation and grpc's own ends (abort, client gone, stop) pass."""
        try:
            yield
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError):
                raise
            request_id = current_request_id()
            if isinstance(error, RolloutError) and error.code != RolloutError.code:
                retry_s = self._pace.next_delay_s() if isinstance(error, CapacityExceeded) else EARLIEST_S
                await context.abort_with_status(rpc_status.to_status(status_of(error, request_id, retry_s)))
            _logger.exception("internal error in %s, id=%s", details.method, request_id)
            hidden = RolloutError(f"internal error, id={request_id}")
            await context.abort_with_status(rpc_status.to_status(status_of(hidden, request_id)))


def status_of(error: RolloutError, request_id: str = "", retry_s: float = EARLIEST_S) -> status_pb2.Status:
    """The error as ``google.rpc.Status``: ErrorInfo, and BadRequest or RetryInfo (``retry_s``) where they apply."""
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    field = _cut(error.field, 200)
    details: list[Any] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason,
            domain=DOMAIN,
            metadata={"request_id": request_id} | ({"field": field} if field else {}),
        )
    ]
    if error.field and error.code == "INVALID_ARGUMENT":
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=_cut(error.message, 200))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, CapacityExceeded):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(1e9 * retry_s))
        details.append(retry)
    packed = [any_pb2.Any() for _ in details]
    for slot, detail in zip(packed, details, strict=True):
        slot.Pack(detail)
    return status_pb2.Status(code=grpc.StatusCode[error.code].value[0], message=message, details=packed)


def _cut(text: str, limit: int) -> str:
    # Lone surrogates cannot travel in UTF-8; show them escaped.
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "..."


def standard_interceptors(*inner: grpc.aio.ServerInterceptor) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """Request id, errors, then ``inner``: a guard in ``inner`` (authentication) may raise typed errors."""
    return (RequestIdInterceptor(), ErrorInterceptor(), *inner)
