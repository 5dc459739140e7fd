"""How many calls there may be at a time, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from rollout.access import refusing, required_role
from rollout.call_scope import current_scope
from rollout.errors import CapacityExceeded, RequestAborted
from rollout.interceptors import Context, GuardInterceptor, Handler, client_of
from rollout.server_settings import RequestLimits


class CallLimits(GuardInterceptor):
    """Counts live calls, in all and by client. Probes are never refused."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._live = 0
        self._by_client: dict[str, int] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Refuse before the request is read where there is no room already."""
        handler = await super().intercept_service(continuation, handler_call_details)
        full = self._live >= self._limits.max_concurrent_rpcs
        if handler is not None and full and _counts(handler_call_details):
            return refusing(self._full())
        return handler

    @asynccontextmanager
    async def guard(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        """Hold a place for the length of the call."""
        if not _counts(details):
            yield
            return
        client = client_of(context)
        self._enter(client)
        scope = current_scope()
        try:
            async with asyncio.timeout(self._limits.max_call_s) as deadline:
                if scope is not None:
                    scope.deadline = deadline
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            if scope is not None and scope.end_reason is not None:
                raise scope.end_reason from None
            raise RequestAborted(
                f"the call lasted {self._limits.max_call_s:g} s, its limit (server.max_call_s); ask for less at a time"
            ) from None
        finally:
            if scope is not None:
                scope.deadline = None
            self._leave(client)

    def _full(self) -> CapacityExceeded:
        return CapacityExceeded(f"{self._live} calls are live, the limit (server.max_concurrent_rpcs); try again later")

    def _enter(self, client: str) -> None:
        mine, most = self._by_client.get(client, 0), self._limits.calls_per_client
        if self._live >= self._limits.max_concurrent_rpcs:
            raise self._full()
        if mine >= most:
            raise CapacityExceeded(
                f"client {client!r} has {mine} live calls, its limit (server.max_concurrent_rpcs_per_client); "
                "wait for some to end"
            )
        self._live += 1
        self._by_client[client] = mine + 1

    def _leave(self, client: str) -> None:
        self._live -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]


def _counts(details: grpc.HandlerCallDetails) -> bool:
    return required_role(str(details.method)) is not None
