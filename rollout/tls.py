"""The server's TLS: certificates from files that are read again when they change."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc

from rollout.errors import ConfigError
from rollout.server_settings import AccessSettings

log = logging.getLogger(__name__)


def server_credentials(settings: AccessSettings) -> grpc.ServerCredentials | None:
    """Credentials of the configured files, None without TLS. With ``tls_client_ca`` clients must show a certificate.

    Raises:
        ConfigError: a file cannot be read, or key and certificate do not belong together.
    """
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return _dynamic(_Files(settings), require_client=settings.tls_client_ca is not None)


def _dynamic(files: _Files, *, require_client: bool) -> grpc.ServerCredentials:
    make: Callable[..., grpc.ServerCredentials] = grpc.dynamic_ssl_server_credentials
    return make(files.load(), files.changed, require_client_authentication=require_client)


class _Files:
    """The files and what was seen of them last."""

    def __init__(self, settings: AccessSettings) -> None:
        self._certificate = Path(str(settings.tls_certificate))
        self._key = Path(str(settings.tls_key))
        self._client_ca = None if settings.tls_client_ca is None else Path(settings.tls_client_ca)
        self._seen = self._signature()

    def load(self) -> grpc.ServerCertificateConfiguration:
        """What the files say now, checked: gRPC itself would take a key that does not fit, and fail every handshake."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key)
            if self._client_ca is not None:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(self._client_ca)
            pair = (self._key.read_bytes(), self._certificate.read_bytes())
            roots = None if self._client_ca is None else self._client_ca.read_bytes()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            names = f"{self._certificate}, {self._key}" + (f", {self._client_ca}" if self._client_ca else "")
            raise ConfigError(
                f"server.tls_certificate, tls_key or tls_client_ca ({names}) cannot be used: {error}; they must be PEM "
                "files, and the key that of the certificate",
                field="server.tls_certificate",
            ) from error
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """For every handshake: the new files, or None to go on with what is in force."""
        now = self._signature()
        if now == self._seen:
            return None
        try:
            fresh = self.load()
        except ConfigError as error:
            # Between two files of one rotation they do not fit; the next handshake looks again.
            log.error("the certificate read before stays in force: %s", error.message)
            return None
        self._seen = now
        log.info("certificate read again from %s", self._certificate)
        return fresh

    def _signature(self) -> tuple[object, ...]:
        paths = [p for p in (self._certificate, self._key, self._client_ca) if p is not None]
        try:
            return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in map(os.stat, paths))
        except OSError as error:
            return (error.errno,)
