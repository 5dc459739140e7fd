"""A real service to hurt: workers in Ray actors that outlive their gateway, the gateway a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
import yaml

from rollout.errors import RolloutError
from rollout.types import ReplicaLoad, ServerInfo
from tests.e2e.chaos.proxy import Proxy
from tests.services import tiny_settings
from trainer_bridge.aio_client import AsyncRolloutClient

ROOT = Path(__file__).parents[3]
DEADLINE_S = 120.0
"""Nothing here may take longer; it is a hang."""
REPLICAS = 2


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class World:
    """A service on a Ray cluster that this process has started."""

    def __init__(self, folder: Path, model: Path, address: str) -> None:
        self.namespace = f"chaos-{secrets.token_hex(4)}"
        self.port = free_port()
        self._address = address
        self._log = folder / "gateway.log"
        settings = tiny_settings(model, replicas=REPLICAS).model_dump(by_alias=True)
        # A quarter of a CPU each: those that are being started again find room beside zombies.
        settings["worker"] |= {
            "num_cpus": 0.25, "answer_timeout_s": 4.0, "step_timeout_s": 20.0, "outlive_gateway_s": 60.0
        }  # fmt: skip
        settings["server"] |= {"port": self.port, "drain_s": 1.0}
        settings["ray"] |= {"address": address, "namespace": self.namespace}
        self._config = folder / "chaos.yaml"
        self._config.write_text(yaml.safe_dump(settings))
        self._gateway: asyncio.subprocess.Process | None = None
        self.proxy = Proxy(self.port)
        self.client: AsyncRolloutClient
        self.control: AsyncRolloutClient
        """past the proxy"""

    async def __aenter__(self) -> World:
        port = await self.proxy.start()
        self.client = AsyncRolloutClient(f"127.0.0.1:{port}", timeout_s=DEADLINE_S)
        self.control = AsyncRolloutClient(f"127.0.0.1:{self.port}", timeout_s=DEADLINE_S)
        try:
            await self.start_gateway()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.control.close()
        await self.proxy.stop()
        if self._gateway is not None and self._gateway.returncode is None:
            self._gateway.terminate()
            try:
                await asyncio.wait_for(self._gateway.wait(), 30)
            except TimeoutError:
                self._gateway.kill()
        for actor in self._actors().values():
            with contextlib.suppress(Exception):
                ray.kill(actor)

    # ---- gateway ------------------------------------------------------------------------------------------------

    async def start_gateway(self) -> None:
        """Returns once it serves."""
        environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._gateway = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rollout", "serve", "--config", str(self._config),
                stdout=log, stderr=log, env=environ, cwd=ROOT,
            )  # fmt: skip
        await self.until(lambda info: any(r.healthy for r in info.replicas), "the gateway to serve")

    async def kill_gateway(self) -> None:
        """SIGKILL."""
        assert self._gateway is not None
        self._gateway.kill()
        await self._gateway.wait()

    def log(self) -> str:
        """What the gateways said."""
        return self._log.read_text(errors="replace")

    # ---- workers ------------------------------------------------------------------------------------------------

    def _actors(self) -> dict[str, Any]:
        listed = ray.util.list_named_actors(all_namespaces=True)
        found: dict[str, Any] = {}
        for entry in listed:
            if entry["namespace"] == self.namespace:
                with contextlib.suppress(ValueError):
                    found[entry["name"]] = ray.get_actor(entry["name"], namespace=self.namespace)
        return found

    async def pids(self) -> dict[str, int]:
        """Replica -> process of its newest worker that answers."""
        actors = self._actors()
        pids: dict[str, int] = {}
        for full, actor in actors.items():
            with contextlib.suppress(Exception):
                pids[full.partition(".")[0]] = await asyncio.wait_for(_value(actor.pid.remote()), 3)
        return pids

    async def loads(self) -> list[ReplicaLoad]:
        return list((await self.control.info()).replicas)

    async def until(self, holds: Any, what: str) -> ServerInfo:
        """Ask until ``holds(info)``; AssertionError after ``DEADLINE_S``."""
        deadline = time.monotonic() + DEADLINE_S
        last: object = None
        while time.monotonic() < deadline:
            try:
                info = await asyncio.wait_for(self.control.info(), 15)
                last = info.replicas
                if holds(info):
                    return info
            except (RolloutError, TimeoutError) as error:
                last = error
            assert self._gateway is None or self._gateway.returncode is None, f"the gateway ended: {self.log()[-2000:]}"
            await asyncio.sleep(0.1)
        raise AssertionError(f"waited {DEADLINE_S:g} s for {what}; last: {last}; log: {self.log()[-3000:]}")


async def _value(reference: Any) -> Any:
    return await reference


@contextlib.asynccontextmanager
async def running_world(folder: Path, model: Path) -> AsyncIterator[World]:
    """On the cluster that this process is connected to."""
    address = ray.get_runtime_context().gcs_address
    async with World(folder, model, address) as world:
        yield world


def send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was there to get it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
