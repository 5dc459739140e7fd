"""What is known about the call that this task serves: who calls, what is noted for the log, and how to end it early."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from rollout.errors import PermissionDenied, RolloutError


class Role(enum.StrEnum):
    """What a caller may do; each role includes the ones before it."""

    GENERATE = "generate"
    """Generate, score, read the description, abort own requests."""
    CONTROL = "control"
    """Also change weights, pause, abort what belongs to others, read taps."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls."""

    name: str
    """"" where nothing proves who it is"""
    role: Role

    def may(self, role: Role) -> bool:
        """Whether the caller's role includes ``role``."""
        return self.role is Role.CONTROL or role is Role.GENERATE


ANYONE = Caller("", Role.CONTROL)
"""The caller where neither tokens nor client certificates are asked for."""


class CallScope:
    """One call. Lives as long as the call does."""

    def __init__(self) -> None:
        self.caller = ANYONE
        self.notes: dict[str, object] = {}
        self.end_reason: RolloutError | None = None
        self.deadline: asyncio.Timeout | None = None

    def end(self, reason: RolloutError) -> bool:
        """Cancel what the call's task waits for, and let the call end with ``reason``; False where nothing can."""
        if self.deadline is None or self.end_reason is not None:
            return self.end_reason is not None
        self.end_reason = reason
        try:
            self.deadline.reschedule(asyncio.get_running_loop().time())
        except RuntimeError:  # it is ending already
            return False
        return True


_scope: ContextVar[CallScope | None] = ContextVar("rollout_call_scope", default=None)


def current_scope() -> CallScope | None:
    """The call that this task serves, None outside of one."""
    return _scope.get()


@contextmanager
def call_scope() -> Iterator[CallScope]:
    """A new scope for the length of a call."""
    scope = CallScope()
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.reset(token)


def note(**fields: object) -> None:
    """Add to what the log will say about this call; nothing outside of one."""
    if (scope := _scope.get()) is not None:
        scope.notes.update(fields)


def require(role: Role, what: str) -> None:
    """Refuse ``what`` to callers without the role.

    Raises:
        PermissionDenied: names the role.
    """
    scope = _scope.get()
    if scope is not None and not scope.caller.may(role):
        raise PermissionDenied(f"{what} needs the role {role.value}; {scope.caller.name} has {scope.caller.role.value}")
