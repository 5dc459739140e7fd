"""Calls that no queue has room for are refused before a byte of their request is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc

from rollout.errors import CapacityExceeded
from rollout.interceptors import Context, GuardInterceptor, client_of, current_request_id

NoRoom: TypeAlias = Callable[[str, str], CapacityExceeded | None]
"""Client and the call's ``x-request-id`` -> why not even one sample of it has room, None where there is some."""

_COUNTED = ("/rollout.v1.RolloutService/Generate", "/rollout.v1.RolloutService/Score")


class Door(GuardInterceptor):
    """Stands inside of access and limits, so that strangers do not learn how full the service is."""

    def __init__(self, no_room: NoRoom) -> None:
        self._no_room = no_room

    @asynccontextmanager
    async def guard(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        """Raises: CapacityExceeded, for a call that asks for samples or scores."""
        if str(details.method) in _COUNTED:
            error = self._no_room(client_of(context), current_request_id())
            if error is not None:
                raise error
        yield
