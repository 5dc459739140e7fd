"""What is written down about calls: who changed weights when, who was turned away; on request, every call.

Neither prompts nor tokens are in it unless ``server.log_prompts`` is set.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from rollout.access import required_role
from rollout.call_scope import CallScope, Role, call_scope
from rollout.errors import RolloutError
from rollout.interceptors import Context, GuardInterceptor, client_of, current_request_id
from rollout.server_settings import AccessSettings

log = logging.getLogger(__name__)
REFUSALS_A_MINUTE = 60
"""More are counted, not written: whoever knocks without a key must not fill the disk."""
_REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")


class AuditLog:
    """Appends JSON lines to a file, opened for every line so that it may be rotated; without a file, to the log."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)

    def write(self, record: dict[str, object]) -> None:
        """One line. Where the file cannot be written the line goes to the log, as an error."""
        line = json.dumps(record, default=str)
        if self._path is None:
            log.info("audit %s", line)
            return
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, line.encode() + b"\n")
            finally:
                os.close(file)
        except OSError as error:
            log.error("the audit log %s cannot be written (%s); its line: %s", self._path, error.strerror, line)


class AuditInterceptor(GuardInterceptor):
    """Stands inside the error interceptor and outside of those that refuse."""

    def __init__(self, settings: AccessSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit = AuditLog(settings.audit_log)
        self._requests = settings.log_requests
        self._clock = clock
        self._refusals: deque[float] = deque(maxlen=REFUSALS_A_MINUTE)
        self._unwritten = 0

    @asynccontextmanager
    async def guard(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        """Open the call's scope, and write down how the call ended."""
        start = self._clock()
        code, reason = "INTERNAL", ""
        with call_scope() as scope:
            try:
                yield
                code = "OK"
            except RolloutError as error:
                code, reason = error.code, error.message
                raise
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            finally:
                self._write(details, context, scope, code, reason, self._clock() - start)

    def _write(
        self, details: grpc.HandlerCallDetails, context: Context, scope: CallScope, code: str, reason: str, took: float
    ) -> None:
        refused = code in _REFUSED
        control = required_role(str(details.method)) is Role.CONTROL or bool(scope.notes.get("control"))
        if not (refused or control or self._requests):
            return
        record: dict[str, Any] = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "event": "refused" if refused else "control" if control else "request",
            "method": str(details.method).rpartition("/")[2][:100],
            "caller": scope.caller.name or client_of(context),
            "peer": str(context.peer()),
            "call": current_request_id(),
            "code": code,
            "seconds": round(took, 4),
            **scope.notes,
        }
        if reason:
            record["reason"] = reason[:300]
        if refused:
            self._write_refusal(record)
        elif control:
            self._audit.write(record)
        else:
            log.info("request %s", json.dumps(record, default=str))

    def _write_refusal(self, record: dict[str, Any]) -> None:
        now = self._clock()
        if len(self._refusals) == REFUSALS_A_MINUTE and now - self._refusals[0] < 60:
            self._unwritten += 1
            return
        self._refusals.append(now)
        unwritten, self._unwritten = self._unwritten, 0
        self._audit.write(record | ({"refusals_not_written": unwritten} if unwritten else {}))
