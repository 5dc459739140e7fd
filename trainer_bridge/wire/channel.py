"""How clients reach a service: plain on loopback, with TLS, with a client certificate, with a token."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from rollout.config import is_loopback
from rollout.errors import ConfigError
from rollout.server_settings import AccessSettings
from rollout.v1 import rollout_pb2, rollout_pb2_grpc
from trainer_bridge.wire.request import channel_options

Metadata = tuple[tuple[str, str], ...]
ENVIRONMENT: Mapping[str, str] = {
    "ca": "ZERODRIFT_TLS_CA",
    "certificate": "ZERODRIFT_TLS_CERTIFICATE",
    "key": "ZERODRIFT_TLS_KEY",
    "server_name": "ZERODRIFT_TLS_SERVER_NAME",
    "token": "ZERODRIFT_TOKEN",
    "token_file": "ZERODRIFT_TOKEN_FILE",
}
"""Field -> environment variable that the command line reads it from."""


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """What a client shows and whom it trusts. Nothing of it: a plain channel without a token."""

    ca: Path | None = None
    """PEM file of the authorities that sign servers; switches TLS on."""
    certificate: Path | None = None
    """PEM file of the client's own chain, for mutual TLS."""
    key: Path | None = None
    """PEM file of its private key."""
    server_name: str | None = None
    """Name to expect in the server's certificate, where it is not the one in the address."""
    token: str | None = field(default=None, repr=False)
    """Bearer token."""
    token_file: Path | None = None
    """File of the token, read for every call, so that it may be replaced."""
    allow_insecure: bool = False
    """Whether the token may be sent without TLS beyond this machine, where anyone on the way can read it."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("certificate and key of a client belong together; give both, or neither", field="key")
        if self.certificate is not None and self.ca is None:
            raise ConfigError("a client certificate needs TLS: give ca, the authority of the server", field="ca")
        if self.token is not None and self.token_file is not None:
            raise ConfigError("token and token_file are both given; choose one", field="token")

    @classmethod
    def from_environment(cls) -> Self:
        """What ``ZERODRIFT_TLS_CA`` and its like say; empty variables count as unset."""
        given: dict[str, Any] = {name: os.environ.get(variable) or None for name, variable in ENVIRONMENT.items()}
        paths = {name: None if given[name] is None else Path(given[name]) for name in _PATHS}
        return cls(**(given | paths))

    @classmethod
    def towards(cls, address: str | None, server: AccessSettings) -> Self:
        """From the environment for a service that runs elsewhere; for one of our own only if it asks for something."""
        asks = server.tls_certificate is not None or server.tokens is not None
        return cls.from_environment() if address is not None or asks else cls()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Of the channel; None for a plain one.

        Raises:
            ConfigError: a file cannot be read.
        """
        if self.ca is None:
            return None
        key = None if self.key is None else _read(self.key, "key")
        certificate = None if self.certificate is None else _read(self.certificate, "certificate")
        return grpc.ssl_channel_credentials(_read(self.ca, "ca"), key, certificate)

    def headers(self) -> Metadata:
        """Metadata that every call carries.

        Raises:
            ConfigError: the token cannot be read, or is none.
        """
        token = self.token
        if self.token_file is not None:
            token = _read(self.token_file, "token_file").decode("utf-8", "replace").strip()
        if token is None:
            return ()
        if not token.isascii() or not token.isprintable() or not token or " " in token:
            # Not quoted: whatever it is, it may be a secret.
            raise ConfigError("the token is empty or holds signs that no header takes", field="token")
        return (("authorization", f"Bearer {token}"),)

    def check(self, address: str) -> None:
        """Refuse an address that is none, and to send a token in the clear beyond this machine.

        Raises:
            ConfigError: names the way out.
        """
        check_address(address)
        has_token = self.token is not None or self.token_file is not None
        if has_token and self.ca is None and not self.allow_insecure and not is_loopback(_host(address)):
            raise ConfigError(
                f"a token would travel to {address} without TLS; give the authority of the server (ca, or "
                "ZERODRIFT_TLS_CA), or set allow_insecure on a network you trust",
                field="ca",
            )


_URL_SCHEMES = ("http", "https", "grpc", "grpcs", "tcp")
_GRPC_SCHEMES = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
"""Of gRPC's name syntax (grpc/doc/naming.md): taken as they are."""
_PATHS = ("ca", "certificate", "key", "token_file")
PLAIN = ClientSecurity()


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} = {path} cannot be read: {error.strerror}", field=name) from error


def check_address(address: str) -> None:
    """Refuse what gRPC would take for the name of a machine and look for in vain.

    Raises:
        ConfigError: a URL, or no port.
    """
    scheme, colon, rest = address.partition("://")
    if colon and scheme.lower() in _URL_SCHEMES:
        raise ConfigError(
            f"the address {address!r} is a URL; give host:port, here {rest.rstrip('/')!r}: a service speaks gRPC, and "
            "TLS is asked for by ca (ZERODRIFT_TLS_CA)",
            field="address",
        )
    named = address.partition(":")[0] in _GRPC_SCHEMES
    port = address.rpartition(":")[2]
    if not named and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536 and _host(address)):
        raise ConfigError(f"the address {address!r} is not host:port with a port of 1 to 65535", field="address")


def _host(address: str) -> str:
    return address if address.startswith("unix:") else address.rpartition(":")[0].strip("[]")


def _options(security: ClientSecurity, max_message_bytes: int) -> list[tuple[str, Any]]:
    named = [("grpc.ssl_target_name_override", security.server_name)] if security.server_name else []
    return [*channel_options(max_message_bytes), *named]


def open_channel(address: str, security: ClientSecurity, max_message_bytes: int) -> grpc.Channel:
    """A channel of the synchronous client.

    Raises:
        ConfigError: a file cannot be read, or a token would travel in the clear.
    """
    security.check(address)
    credentials, options = security.credentials(), _options(security, max_message_bytes)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_aio_channel(address: str, security: ClientSecurity, max_message_bytes: int) -> grpc.aio.Channel:
    """The same for the asyncio client; belongs to the running loop."""
    security.check(address)
    credentials, options = security.credentials(), _options(security, max_message_bytes)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def rollout_stub(channel: Any) -> Any:
    """The generated stub, but for UpdateWeights, which takes messages that are serialized already."""
    stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
    stub.UpdateWeights = channel.stream_unary(
        "/rollout.v1.RolloutService/UpdateWeights", response_deserializer=rollout_pb2.UpdateWeightsResponse.FromString
    )
    return stub


class AuthorizedStub:
    """A stub whose every call carries the security's headers as well."""

    def __init__(self, stub: Any, security: ClientSecurity) -> None:
        self._stub, self._security = stub, security

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._stub, name)

        def call(request: Any, *, metadata: Metadata = (), **options: Any) -> Any:
            return method(request, metadata=(*metadata, *self._security.headers()), **options)

        return call
