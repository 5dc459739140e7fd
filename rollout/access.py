"""Who may call what: bearer tokens with roles, from a file that is read again when it changes."""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from rollout.call_scope import ANYONE, Caller, Role, current_scope
from rollout.errors import ConfigError, PermissionDenied, RolloutError, Unauthenticated
from rollout.interceptors import CLIENT_ID_KEY, Context, GuardInterceptor, Handler
from rollout.secret import Secret

log = logging.getLogger(__name__)
_NAME = re.compile(r"[\x21-\x7e]{1,128}")
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")
_BEARER = "Bearer "

_SERVICE = "/rollout.v1.RolloutService/"
ROLES: Mapping[str, Role | None] = {
    f"{_SERVICE}Generate": Role.GENERATE,
    f"{_SERVICE}Score": Role.GENERATE,
    f"{_SERVICE}GetServerInfo": Role.GENERATE,
    f"{_SERVICE}Abort": Role.GENERATE,  # of own requests; the service looks at whose they are
    f"{_SERVICE}UpdateWeights": Role.CONTROL,
    f"{_SERVICE}Pause": Role.CONTROL,
    f"{_SERVICE}Resume": Role.CONTROL,
    "/rollout.v1.ControlService/ListReplicas": Role.CONTROL,
    "/rollout.v1.ControlService/DrainReplica": Role.CONTROL,
    "/rollout.v1.ControlService/UndrainReplica": Role.CONTROL,
    "/rollout.v1.ControlService/RestartReplicas": Role.CONTROL,
    "/rollout.v1.DebugService/Trace": Role.CONTROL,
    "/rollout.v1.DebugService/GetTensor": Role.CONTROL,
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/Watch": Role.GENERATE,  # lasts for ever, so it must count
    "/grpc.health.v1.Health/List": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.GENERATE,
}
"""Method -> role it needs; None: open to everyone, as probes carry no token."""


def required_role(method: str) -> Role | None:
    """The role a method needs; whatever is not listed needs the highest."""
    return ROLES.get(method, Role.CONTROL)


@dataclass(frozen=True, slots=True)
class _Entry:
    caller: Caller
    secret: Secret


class TokenFile:
    """Lines ``NAME ROLE sha256:HEX``; empty lines and ``#`` comments are skipped. Read again whenever it changes.

    A changed file that cannot be read or parsed leaves the tokens read before it in force, and is logged as an error.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises: ConfigError when the file cannot be used."""
        self._path = Path(path)
        self._seen: object = self._signature()
        self._entries = self._read()

    def caller_of(self, token: str) -> Caller | None:
        """Whose token this is. Every entry is compared, whichever matches."""
        self._refresh()
        found: Caller | None = None
        for entry in self._entries:
            if entry.secret.matches(token):
                found = entry.caller
        return found

    def _refresh(self) -> None:
        now = self._signature()
        if now == self._seen:
            return
        self._seen = now
        try:
            self._entries = self._read()
            log.info("tokens of %d callers read again from %s", len(self._entries), self._path)
        except ConfigError as error:
            log.error("the tokens read before stay in force: %s", error.message)

    def _signature(self) -> object:
        try:
            found = os.stat(self._path)
        except OSError as error:
            return error.errno
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def _read(self) -> tuple[_Entry, ...]:
        try:
            if self._path.stat().st_mode & stat.S_IWOTH:
                raise ConfigError(f"server.tokens = {self._path} may be written by everyone; chmod o-w", field=_FIELD)
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"server.tokens = {self._path} cannot be read: {error}", field=_FIELD) from error
        entries = [
            self._entry(number, words)
            for number, line in enumerate(lines, 1)
            if (words := line.partition("#")[0].split())
        ]
        if not entries:
            raise ConfigError(
                f"server.tokens = {self._path} holds no token; add the line that `zerodrift token` prints", field=_FIELD
            )
        return tuple(entries)

    def _entry(self, number: int, words: list[str]) -> _Entry:
        digest = _SHA256.fullmatch(words[2]) if len(words) == 3 else None
        # The line is not quoted: a token may have been pasted where its digest belongs.
        if digest is None or words[1] not in list(Role) or not _NAME.fullmatch(words[0]):
            raise ConfigError(
                f"{self._path}, line {number}: expected NAME {'|'.join(Role)} sha256:HEX, as `zerodrift token` prints",
                field=_FIELD,
            )
        return _Entry(Caller(words[0], Role(words[1])), Secret(bytes.fromhex(digest[1])))


_FIELD = "server.tokens"


def new_token(name: str, role: Role) -> tuple[str, str]:
    """A fresh token of 32 random bytes, and its line for the tokens file.

    Raises:
        ConfigError: a name with blanks or other signs that no header holds.
    """
    if not _NAME.fullmatch(name) or "#" in name:
        raise ConfigError(f"name = {name!r} must be 1 to 128 visible ASCII characters without #", field="name")
    token = secrets.token_urlsafe(32)
    return token, f"{name} {role.value} sha256:{Secret.of(token).hex}"


class AccessInterceptor(GuardInterceptor):
    """Tells who calls and refuses what their role does not cover, before a byte of the request is read.

    Args:
        tokens: None where none are asked for; then a client certificate names the caller, if there is one.
    """

    def __init__(self, tokens: TokenFile | None) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler found, or one that only refuses; None for a method that does not exist, whoever asks.

        Names that callers make up must not reach logs and metrics.
        """
        handler = await super().intercept_service(continuation, handler_call_details)
        if handler is None:
            return None
        try:
            self._caller(handler_call_details)
        except RolloutError as error:
            return refusing(error)
        return handler

    def _caller(self, details: grpc.HandlerCallDetails) -> Caller:
        needed = required_role(str(details.method))
        if self._tokens is None or needed is None:
            return ANYONE
        headers = [(key, value) for key, value in details.invocation_metadata or () if isinstance(value, str)]
        given = [value for key, value in headers if key == "authorization"]
        if len(given) != 1 or not given[0].startswith(_BEARER):
            raise Unauthenticated(
                f"{len(given)} authorization headers; send one: 'authorization: Bearer TOKEN' (client option token or "
                "token_file)"
            )
        caller = self._tokens.caller_of(given[0].removeprefix(_BEARER))
        if caller is None:
            raise Unauthenticated("the token is not known here; ask for one, or see whether it was replaced")
        if not caller.may(needed):
            method = str(details.method).rpartition("/")[2]
            raise PermissionDenied(f"{method} needs the role {needed.value}; {caller.name} has {caller.role.value}")
        for key, value in headers:
            _check_client_id(caller, key, value)
        return caller

    @asynccontextmanager
    async def guard(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        """Note who calls."""
        caller = self._caller(details)
        if self._tokens is None and (name := _certificate_name(context)):
            caller = Caller(name, Role.CONTROL)
            for key, value in details.invocation_metadata or ():
                _check_client_id(caller, key, value)
        if (scope := current_scope()) is not None:
            scope.caller = caller
        yield


def _check_client_id(caller: Caller, key: str, value: object) -> None:
    if key == CLIENT_ID_KEY and value != caller.name:
        raise PermissionDenied(
            f"{CLIENT_ID_KEY} names another client than {caller.name}, whose call this is; leave client_id out"
        )


def _certificate_name(context: Context) -> str:
    """Common name of the client's certificate, verified by TLS; "" without one."""
    names = (context.auth_context() or {}).get("x509_common_name", ())
    return next((name.decode("utf-8", "replace") for name in names), "")


def refusing(error: RolloutError) -> Handler:
    """A handler of any method that raises at once. It reads nothing, so that nobody's bytes take up memory."""

    async def refuse(requests: Any, context: Context) -> None:
        raise error

    make: Callable[..., Handler] = grpc.stream_stream_rpc_method_handler
    return make(refuse)
