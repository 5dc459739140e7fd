"""A whole service: Ray, replicas, pool and gRPC server, started and stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import ray

from rollout.admission import AdmittingBackend
from rollout.adoption import adopt_workers
from rollout.assets import prepare_model
from rollout.checkpoint import read_config
from rollout.config import ServerSettings, Settings
from rollout.control_service import SERVICE_NAME as CONTROL_NAME
from rollout.control_service import ControlService
from rollout.debug_service import SERVICE_NAME as DEBUG_NAME
from rollout.debug_service import DebugService
from rollout.errors import ConfigError
from rollout.garbage import settle_heap
from rollout.heap import kept_memory
from rollout.metered import MeteredBackend
from rollout.metering import MeteringInterceptor
from rollout.metrics import make_meter
from rollout.multimodal import is_multimodal
from rollout.pool import Pool
from rollout.replica import AbsentReplica, LocalReplica, Replica, start_ray_replica
from rollout.server import RunningServer, start_server
from rollout.supervisor import RestartLimits, Supervisor
from rollout.v1.control_pb2_grpc import add_ControlServiceServicer_to_server
from rollout.v1.debug_pb2_grpc import add_DebugServiceServicer_to_server
from rollout.worker import Worker, load_tokenizer

log = logging.getLogger(__name__)
_KEPT_BUCKETS = 4
"""One that is being staged, one that comes in, and the messages of both."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service that takes traffic."""

    address: str
    """host:port"""
    model_path: Path
    pool: Pool
    server: RunningServer
    backend: MeteredBackend
    """the pool as the server sees it, with its calls counted"""
    supervisor: Supervisor
    metrics: str
    """where metrics go, in words or as an address"""


@contextlib.contextmanager
def ray_cluster(settings: Settings) -> Iterator[None]:
    """Connect to the configured Ray cluster, or start one here and stop it afterwards; a connected driver is reused."""
    if ray.is_initialized():
        _check_room(settings)
        yield
        return
    address = settings.ray.address
    # In a Ray job RAY_ADDRESS names the cluster; sizes belong to a cluster that is started here.
    starting = address is None and not os.environ.get("RAY_ADDRESS")
    sizes: dict[str, Any] = {"num_cpus": settings.ray.num_cpus, "include_dashboard": False} if starting else {}
    if starting:
        # Ray runs workers at niceness 15: whoever else wakes up takes a core from an engine in the middle of a step.
        os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        # Without an address Ray joins whatever cluster was last started on this machine, whosever it is.
        address="local" if starting else address,
        namespace=settings.ray.namespace,
        log_to_driver=False,
        logging_level=logging.ERROR,
        **sizes,
    )
    try:
        _check_room(settings)
        yield
    finally:
        ray.shutdown()


def _check_room(settings: Settings) -> None:
    """Refuse replicas that could never be scheduled, before anyone waits for them."""
    worker = settings.worker
    asked = {name: each for name, each in {"CPU": worker.num_cpus, **worker.resources}.items() if each}
    have = ray.cluster_resources()
    for name, each in asked.items():
        if have.get(name, 0.0) < worker.count * each:
            raise ConfigError(
                f"{worker.count} replicas of {each:g} {name} need {worker.count * each:g}, the Ray cluster has "
                f"{have.get(name, 0.0):g}; lower worker.count or what each asks for, or add nodes (ray.num_cpus for a "
                "cluster that is started here)",
                field="worker.count",
            )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = [[int(node.get(name, 0.0) / each + 1e-6) for name, each in asked.items()] for node in nodes]
    places = sum(min(each, default=0) for each in fits)
    if asked and places < worker.count:
        raise ConfigError(
            f"a replica lies on one node, and the {len(nodes)} nodes have room for {places} that ask for {asked} each, "
            f"not for {worker.count}; lower worker.count, or add nodes of that size",
            field="worker.count",
        )


async def _replicas(settings: Settings, path: Path, owner: str, in_process: bool) -> list[Replica]:
    names = [f"replica-{i}" for i in range(settings.worker.count)]
    if in_process:
        return [LocalReplica(Worker(settings, str(path), name), name) for name in names]
    if settings.worker.outlive_gateway_s and (found := await adopt_workers(settings, str(path), names, owner)):
        return [found.get(name) or AbsentReplica(name) for name in names]
    return [start_ray_replica(settings, str(path), name, owner) for name in names]


def _server_settings(settings: Settings, path: Path) -> ServerSettings:
    """The server's settings, resolved for the model: an image may take whatever a message holds."""
    server = settings.server
    if server.max_request_bytes is None and is_multimodal(read_config(path)):
        return server.model_copy(update={"max_request_bytes": server.max_message_bytes})
    return server


def _supervisor(pool: Pool, settings: Settings, path: Path, owner: str, in_process: bool) -> Supervisor:
    async def make(name: str) -> Replica:
        return start_ray_replica(settings, str(path), name, owner)

    # A worker in this process shares its fate: there is nothing to start again.
    attempts = 0 if in_process else settings.worker.max_restarts
    return Supervisor(
        pool, make, RestartLimits(settings.worker.start_timeout_s, attempts, settings.weights.bucket_bytes)
    )


def _further(
    supervisor: Supervisor, replicas: list[Replica], debug: bool
) -> dict[str, Callable[[grpc.aio.Server], None]]:
    control = ControlService(supervisor)
    services: dict[str, Callable[[grpc.aio.Server], None]] = {
        CONTROL_NAME: lambda server: add_ControlServiceServicer_to_server(control, server)
    }
    if debug:
        taps = DebugService(replicas)
        services[DEBUG_NAME] = lambda server: add_DebugServiceServicer_to_server(taps, server)
    return services


@contextlib.contextmanager
def _own_process(settings: Settings) -> Iterator[None]:
    """A process that does nothing else: Ray around it, and room for the messages of an update."""
    with kept_memory(_KEPT_BUCKETS * settings.weights.bucket_bytes), ray_cluster(settings):
        yield


@contextlib.asynccontextmanager
async def running_service(settings: Settings, *, in_process: bool = False) -> AsyncIterator[Service]:
    """Start everything, yield while it serves, then drain and stop.

    Args:
        in_process: host the workers in this process instead of Ray actors (single use and tests; same bits).
    """
    path = await asyncio.get_running_loop().run_in_executor(None, prepare_model, settings.model.path)
    with contextlib.nullcontext() if in_process else _own_process(settings):
        owner = secrets.token_hex(8)
        replicas = await _replicas(settings, path, owner, in_process)
        # A worker in this process is never started again.
        keep = settings.weights.keep and settings.worker.max_restarts > 0 and not in_process
        pool = Pool(replicas, settings, settings.model.path, load_tokenizer(settings, path), keep_weights=keep)
        try:
            await pool.start()
            supervisor = _supervisor(pool, settings, path, owner, in_process)
            config = await asyncio.get_running_loop().run_in_executor(None, _server_settings, settings, path)
            meter, where = make_meter(settings.metrics.exporter, settings.metrics.host, settings.metrics.port)
            log.info("metrics go to %s", where)
            backend = AdmittingBackend(pool, meter, settings)
            watching = asyncio.create_task(backend.watch(), name="metrics of replicas")
            server = await start_server(
                backend,
                host=config.host,
                port=config.port,
                max_message_bytes=config.max_message_bytes,
                max_concurrent_rpcs=config.max_concurrent_rpcs,
                reflection=config.reflection,
                allow_insecure=config.allow_insecure,
                settings=config,
                interceptors=[MeteringInterceptor(meter)],
                no_room=backend.no_room,
                further=_further(supervisor, replicas, config.debug),
            )
            try:
                await server.set_serving(True)
                pool.when_serving_changes(server.set_serving)
                supervisor.start()
                yield Service(f"{config.host}:{server.port}", path, pool, server, backend, supervisor, where)
            finally:
                watching.cancel()
                meter.close()
                await server.stop(config.drain_s if pool.num_live else 0)
                await supervisor.stop()
        finally:
            await pool.stop()


async def serve(settings: Settings, ready: Callable[[Service], None]) -> None:
    """Serve until SIGTERM or SIGINT, then let running calls finish within ``server.drain_s``."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with running_service(settings) as service:
            # Again, since Ray's driver installs handlers of its own while it connects.
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            settle_heap()
            ready(service)
            await stop.wait()
            log.info("draining %d samples", service.pool.num_live)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
