"""verl's load balancer with a memory of samples and without dead servers (``rollout.router_config_path``).

verl's own hands out dead actors for ever and its client never retries. This one asks a server for its step before it
hands it out, and what it hands out is a ``FailoverHandle``: a call that dies with its server is made again on another,
with the same tag, hence the same seed and the same tokens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from rollout.errors import ReplicaUnavailable
from trainer_bridge.verl.seeds import SampleTag
from trainer_bridge.verl.trajectories import MAX_TRAJECTORIES, Trajectories

log = logging.getLogger(__name__)
DEAD = (RayActorError, ReplicaUnavailable)
"""What a call raises when its server or the service behind it is gone."""


class Router:
    """Least-loaded, sticky by request id. Runs as one asynchronous Ray actor.

    Args:
        servers: server id -> actor handle.
        config: the router's YAML file.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        self._servers: dict[str, Any] = dict(servers)
        self._load = dict.fromkeys(self._servers, 0)
        self._dead: dict[str, str] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._trajectories = Trajectories()
        self._made_again = 0

    async def acquire_server(
        self, request_id: str, prompt_ids: Sequence[int] = (), priority: int | None = None, **_: Any
    ) -> tuple[str, FailoverHandle]:
        """A live server for a request, its load counted.

        Raises:
            RuntimeError: in verl's words, when no server is left.
        """
        server_id, step = await self._take(request_id)
        index = None if priority is None else int(priority)
        tag = self._trajectories.tag(request_id, prompt_ids, step=step, index=index)
        me = ray.get_runtime_context().current_actor
        return server_id, FailoverHandle(server_id, self._servers[server_id], me, request_id, tag)

    async def replace_server(self, request_id: str, dead_id: str, reason: str) -> tuple[str, Any]:
        """Another server for a request whose server died.

        Raises:
            RuntimeError: none is left.
        """
        self._bury(dead_id, reason)
        self._made_again += 1
        server_id, _ = await self._take(request_id)
        return server_id, self._servers[server_id]

    async def turn_aborted(self, request_id: str) -> None:
        """The request's turn was cut from outside; its next call resumes it."""
        self._trajectories.aborted(request_id)

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Uncount one request."""
        if self._load.get(server_id, 0) > 0:
            self._load[server_id] -= 1

    def require_acquire_fields(self) -> list[str]:
        """What verl's client must send along."""
        return ["prompt_ids", "priority"]

    def require_release_fields(self) -> list[str]:
        """Nothing: counts are by server."""
        return []

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Take servers into rotation; a dead one that was restarted under its old id comes back."""
        for server_id, handle in servers.items():
            self._servers[server_id] = handle
            self._load[server_id] = 0
            self._dead.pop(server_id, None)

    def remove_servers(self, server_ids: Sequence[str]) -> None:
        """Take servers out of rotation."""
        for server_id in server_ids:
            self._servers.pop(server_id, None)
            self._load.pop(server_id, None)

    def get_all_servers(self) -> list[str]:
        """Ids in rotation."""
        return list(self._load)

    def get_inflight_count(self, server_id: str) -> int:
        """Requests counted on a server."""
        return self._load.get(server_id, 0)

    def get_total_inflight(self) -> int:
        """Requests counted on all servers."""
        return sum(self._load.values())

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which server a request id went to."""
        cleared = len(self._sticky)
        self._sticky.clear()
        return {"cleared_entries": cleared, "server_loads": dict(self._load)}

    def get_status(self) -> dict[str, Any]:
        """Loads, and the servers that died with the reason."""
        return {
            "servers": dict(self._load),
            "total_inflight": sum(self._load.values()),
            "active_servers": len(self._load),
            "registered_handles": list(self._servers),
            "dead": dict(self._dead),
            "calls_made_again": self._made_again,
        }

    async def _take(self, request_id: str) -> tuple[str, int]:
        while self._load:
            server_id = self._sticky.get(request_id, "")
            if server_id not in self._load:
                server_id = min(self._load, key=self._load.__getitem__)
            self._load[server_id] += 1
            try:
                step = await self._servers[server_id].get_global_steps.remote()
            except DEAD as error:
                self._bury(server_id, str(error))
                continue
            self._sticky[request_id] = server_id
            self._sticky.move_to_end(request_id)
            while len(self._sticky) > MAX_TRAJECTORIES:
                self._sticky.popitem(last=False)
            return server_id, int(step)
        raise RuntimeError(f"No available servers in load balancer (zerodrift; dead: {sorted(self._dead) or 'none'})")

    def _bury(self, server_id: str, reason: str) -> None:
        if server_id in self._load:
            log.error("server %s left rotation: %s", server_id, reason.splitlines()[0] if reason else "no reason")
            self._dead[server_id] = reason
            self.remove_servers([server_id])


class FailoverHandle:
    """Looks like a server's actor handle to verl's client; survives the server. Pickles."""

    def __init__(self, server_id: str, server: Any, router: Any, request_id: str, tag: SampleTag) -> None:
        self._server_id = server_id
        self._server = server
        self._router = router
        self._request_id = request_id
        self._tag = tag

    @property
    def generate(self) -> FailoverHandle:
        """For ``handle.generate.remote(...)``."""
        return self

    async def remote(self, **arguments: Any) -> Any:
        """Generate on this server, or on another if it dies: equal tags give equal tokens.

        Raises:
            RuntimeError: no server is left.
        """
        server_id, server, replaced = self._server_id, self._server, False
        try:
            while True:
                try:
                    output = await server.generate.remote(**arguments, zerodrift_tag=self._tag)
                except DEAD as error:
                    replacement = self._router.replace_server.remote(self._request_id, server_id, str(error))
                    server_id, server = await replacement
                    replaced = True
                    continue
                if output.stop_reason == "aborted":
                    await self._router.turn_aborted.remote(self._request_id)
                return output
        finally:
            # verl's client releases the first server, and dead ones count nothing; the replacement is ours.
            if replaced:
                self._router.release_server.remote(server_id=server_id)
