"""The asyncio gRPC server: RolloutService, health, reflection, limits and keepalive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection as grpc_reflection

from rollout.access import AccessInterceptor, TokenFile
from rollout.audit import AuditInterceptor
from rollout.backend import Backend
from rollout.call_limits import CallLimits
from rollout.codec import SPLIT_BYTES
from rollout.config import ServerSettings, is_loopback
from rollout.door import Door, NoRoom
from rollout.errors import ConfigError
from rollout.interceptors import standard_interceptors
from rollout.receiving import ReceiveInterceptor
from rollout.service import RolloutService
from rollout.tls import server_credentials
from rollout.v1 import rollout_pb2, rollout_pb2_grpc

SERVICE_NAME: str = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
DEFAULT_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
DEFAULT_MAX_CONCURRENT_RPCS = 4096
_HEADROOM_RPCS = 1024
"""Calls above the limit that are still answered, with RetryInfo; beyond them gRPC refuses by itself, without."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that accepts calls. Health says NOT_SERVING until ``set_serving(True)``."""

    port: int
    """The bound port; the one asked for unless that was 0."""
    _server: grpc.aio.Server
    _health: health.aio.HealthServicer

    async def set_serving(self, serving: bool) -> None:
        """Set the health of "" and of the service; ignored once ``stop`` has begun."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace: float | None) -> None:
        """Report NOT_SERVING, refuse new calls, cancel live ones after ``grace`` seconds. May be called again."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    async def wait(self) -> None:
        """Return when the server has stopped."""
        await self._server.wait_for_termination()


async def start_server(
    backend: Backend,
    *,
    host: str,
    port: int,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    max_concurrent_rpcs: int = DEFAULT_MAX_CONCURRENT_RPCS,
    reflection: bool,
    allow_insecure: bool = False,
    settings: ServerSettings | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    no_room: NoRoom | None = None,
    further: Mapping[str, Callable[[grpc.aio.Server], None]] | None = None,
) -> RunningServer:
    """Bind and start.

    Args:
        backend: what answers.
        host: address to bind; beyond loopback only with TLS or ``allow_insecure``.
        port: 0 lets the system choose.
        max_message_bytes: largest message, both ways; a larger request ends with RESOURCE_EXHAUSTED.
        max_concurrent_rpcs: calls beyond this end with RESOURCE_EXHAUSTED and RetryInfo; probes do not count.
        reflection: whether clients may list services and messages.
        allow_insecure: bind beyond loopback without TLS.
        settings: limits of requests, TLS, tokens, audit log; what is also an argument here counts as given here.
        interceptors: run inside the request-id and error interceptors, outside of access and limits.
        no_room: tells of calls that are refused before they are read; None: every call is read.
        further: full name of a further service -> what adds its servicer.

    Raises:
        ConfigError: the address may not be bound, or cannot be.
    """
    config = (settings or ServerSettings()).model_copy(update={"max_concurrent_rpcs": max_concurrent_rpcs})
    credentials = server_credentials(config)
    if credentials is None and not allow_insecure and not is_loopback(host):
        raise ConfigError(
            f"server.host = {host!r} is not loopback and the server has no TLS; set server.tls_certificate and "
            "server.tls_key, bind 127.0.0.1, or set server.allow_insecure = true on a network you trust",
            field="server.allow_insecure",
        )
    server = grpc.aio.server(
        interceptors=standard_interceptors(*interceptors, *_guards(config, no_room)),
        options=_options(max_message_bytes),
        maximum_concurrent_rpcs=max_concurrent_rpcs + _HEADROOM_RPCS,
    )
    service = RolloutService(backend, split_bytes=min(SPLIT_BYTES, max_message_bytes // 2), limits=config)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server)
    for add in (further or {}).values():
        add(server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if reflection:
        names = (SERVICE_NAME, health.SERVICE_NAME, grpc_reflection.SERVICE_NAME, *(further or {}))
        grpc_reflection.enable_server_reflection(names, server)
    running = RunningServer(port=_bind(server, host, port, credentials), _server=server, _health=servicer)
    await running.set_serving(False)
    await server.start()
    return running


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Weights come in messages of this size: a window of 64 KiB, and a frame of 16, would stop and cut them.
        ("grpc.http2.lookahead_bytes", 1 << 20),
        ("grpc.http2.max_frame_size", 1 << 20),
        # Two servers on one port would split the traffic without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _guards(settings: ServerSettings, no_room: NoRoom | None) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """Outside in: what is written down, who may call, how many, whether there is room, what is read."""
    tokens = None if settings.tokens is None else TokenFile(settings.tokens)
    door = () if no_room is None else (Door(no_room),)
    outer = (AuditInterceptor(settings), AccessInterceptor(tokens), CallLimits(settings))
    return (*outer, *door, ReceiveInterceptor(settings))


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"server.port = {port} on {host!r} cannot be bound: {error}; choose another port, or 0 for a free one",
            field="server.port",
        ) from error
    return bound
