"""Count, time and trace every call of the gRPC server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from rollout.errors import RolloutError
from rollout.interceptors import Context, GuardInterceptor
from rollout.metrics import Meter
from rollout.tracing import call_span


class MeteringInterceptor(GuardInterceptor):
    """Stands inside the error interceptor, so that it sees errors by their own type."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    @asynccontextmanager
    async def guard(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        """Time the call and note how it ended."""
        method = str(details.method).rpartition("/")[2]
        start = time.monotonic()
        code = "INTERNAL"
        try:
            async with call_span(details):
                yield
            code = "OK"
        except RolloutError as error:
            code = error.code
            raise
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            self._meter.add("zerodrift_rpc_requests", method=method, code=code)
            self._meter.observe("zerodrift_rpc_seconds", time.monotonic() - start, method=method)
