"""Requests as bytes until they are known to be small enough; then as messages.

grpc.aio parses before any interceptor runs and tells the client its exception where that fails. Here the bytes come
through: size, time and shape are judged inside the interceptors, like everything else.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rollout import codec
from rollout.access import required_role
from rollout.errors import InvalidRequest, RequestAborted
from rollout.interceptors import Context, Handler, behavior_of
from rollout.server_settings import RequestLimits

Parser = Callable[[bytes], Any]
PROBE_S = 5.0
"""Within which the message of a probe must be here."""
_PARSERS: Mapping[str, Parser] = {"/rollout.v1.RolloutService/UpdateWeights": codec.update_from_wire}
"""Method -> what reads its messages in place of the generated class."""


class ReceiveInterceptor(grpc.aio.ServerInterceptor):
    """Stands innermost. A call without a message, or with bytes that are none, is refused by name."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler behind one that takes bytes."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # Probes are open to everyone and do not count: they must not last.
        probe = required_role(str(handler_call_details.method)) is None
        timeout_s = min(PROBE_S, self._limits.receive_timeout_s) if probe else self._limits.receive_timeout_s
        parse = _PARSERS.get(str(handler_call_details.method), handler.request_deserializer)
        return self._receiving(handler, parse, timeout_s)

    def _receiving(self, handler: Handler, parse: Parser | None, timeout_s: float) -> Handler:
        behavior = behavior_of(handler)

        async def stream(raw: AsyncIterator[bytes], context: Context) -> None:
            messages = _Messages(raw, parse)
            responses = behavior(
                messages if handler.request_streaming else await self._only(messages, timeout_s), context
            )
            if not inspect.isasyncgen(responses):
                response = await responses
                # Behaviours that write by themselves return nothing.
                if response is not None:
                    await context.write(response)
                return
            async with aclosing(responses):
                async for response in responses:
                    await context.write(response)

        # The stubs of method_handler know synchronous behaviours only.
        make: Callable[..., Handler] = grpc.stream_stream_rpc_method_handler
        return make(stream, response_serializer=handler.response_serializer)

    async def _only(self, messages: _Messages, timeout_s: float) -> Any:
        limits = self._limits
        try:
            async with asyncio.timeout(timeout_s):
                raw = await anext(messages.raw, None)
        except TimeoutError:
            raise RequestAborted(f"no whole message came within {timeout_s:g} s (server.receive_timeout_s)") from None
        if raw is None:
            raise InvalidRequest("the call ended without a message; send one")
        if len(raw) > limits.max_request_bytes:
            raise InvalidRequest(
                f"the request has {len(raw)} bytes, its limit is {limits.max_request_bytes} "
                "(server.max_request_bytes); send less in one call"
            )
        return messages.parsed(raw)


class _Messages:
    """The messages of a stream; reading may go on after one that was none."""

    def __init__(self, raw: AsyncIterator[bytes], parse: Parser | None) -> None:
        self.raw = aiter(raw)
        self._parse = parse

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        return self.parsed(await anext(self.raw))

    def parsed(self, data: bytes) -> Any:
        """The message, or InvalidRequest."""
        if self._parse is None:
            return data
        try:
            return self._parse(data)
        except DecodeError as error:
            # The parser's text says which type, and nothing of the bytes.
            raise InvalidRequest(f"{error}; send a message of rollout.v1") from error
