"""Requests as bytes until they are known to be small enough; then as messages.

grpc.aio parses before any interceptor runs and tells the client its exception where that fails. Here the bytes come
through: size, time and shape are judged inside the interceptors, like everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rollout import codec
from rollout.access import required_role
from rollout.errors import InvalidRequest, RequestAborted
from rollout.interceptors import Context, Handler, WrappingInterceptor, behavior_of, write_all
from rollout.server_settings import RequestLimits

Parser = Callable[[bytes], Any]
PROBE_S = 5.0
"""Within which the message of a probe must be here."""
_PARSERS: Mapping[str, Parser] = {"/rollout.v1.RolloutService/UpdateWeights": codec.update_from_wire}
"""Method -> what reads its messages in place of the generated class."""


class ReceiveInterceptor(WrappingInterceptor):
    """Stands innermost. A call without a message, or with bytes that are none, is refused by name."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits

    def wrapped(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The handler behind one that takes bytes."""
        # Probes are open to everyone and do not count: they must not last.
        probe = required_role(str(details.method)) is None
        timeout_s = min(PROBE_S, self._limits.receive_timeout_s) if probe else self._limits.receive_timeout_s
        parse = _PARSERS.get(str(details.method), handler.request_deserializer)
        return self._receiving(handler, parse, timeout_s)

    def _receiving(self, handler: Handler, parse: Parser | None, timeout_s: float) -> Handler:
        behavior = behavior_of(handler)

        async def stream(raw: AsyncIterator[bytes], context: Context) -> None:
            messages = _Messages(raw, parse)
            request = messages if handler.request_streaming else await self._only(messages, timeout_s)
            await write_all(behavior(request, context), context)

        # The stubs of method_handler know synchronous behaviours only.
        make: Callable[..., Handler] = grpc.stream_stream_rpc_method_handler
        return make(stream, response_serializer=handler.response_serializer)

    async def _only(self, messages: _Messages, timeout_s: float) -> Any:
        most = self._limits.request_bytes
        try:
            async with asyncio.timeout(timeout_s):
                raw = await anext(messages.raw, None)
        except TimeoutError:
            raise RequestAborted(f"no whole message came within {timeout_s:g} s (server.receive_timeout_s)") from None
        if raw is None:
            raise InvalidRequest("the call ended without a message; send one")
        if len(raw) > most:
            raise InvalidRequest(
                f"the request has {len(raw)} bytes, its limit is {most} (server.max_request_bytes); send less in one "
                "call"
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
