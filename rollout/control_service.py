"""``rollout.v1.ControlService``: drain replicas and start them again."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from rollout import codec
from rollout.errors import InvalidRequest
from rollout.supervisor import ReplicaStanding, Supervisor
from rollout.v1 import control_pb2 as pb
from rollout.v1 import control_pb2_grpc

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["ControlService"].full_name
DEFAULT_WITHIN_S, MOST_WITHIN_S = 60.0, 86_400.0
Context = grpc.aio.ServicerContext[Any, Any]


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Passes on what an operator asks of the supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Context) -> pb.ListReplicasResponse:
        """Where every replica stands."""
        codec.refuse_unknown_fields(request)
        return pb.ListReplicasResponse(replicas=[_to_proto(s) for s in self._supervisor.standings()])

    async def DrainReplica(self, request: pb.DrainReplicaRequest, context: Context) -> pb.DrainReplicaResponse:
        """Out of rotation; waits for its samples."""
        codec.refuse_unknown_fields(request)
        standing = await self._supervisor.drain(request.name, _within(request))
        return pb.DrainReplicaResponse(replica=_to_proto(standing))

    async def UndrainReplica(self, request: pb.UndrainReplicaRequest, context: Context) -> pb.UndrainReplicaResponse:
        """Back into rotation."""
        codec.refuse_unknown_fields(request)
        return pb.UndrainReplicaResponse(replica=_to_proto(self._supervisor.undrain(request.name)))

    async def RestartReplicas(
        self, request: pb.RestartReplicasRequest, context: Context
    ) -> AsyncIterator[pb.RestartReplicasResponse]:
        """One, or all in turn."""
        codec.refuse_unknown_fields(request)
        within_s = _within(request)
        if request.name:
            standing = await self._supervisor.restart(request.name, within_s)
            yield pb.RestartReplicasResponse(replica=_to_proto(standing))
            return
        async with aclosing(self._supervisor.rolling_restart(within_s)) as standings:
            async for standing in standings:
                yield pb.RestartReplicasResponse(replica=_to_proto(standing))


def _to_proto(standing: ReplicaStanding) -> pb.ReplicaStanding:
    return pb.ReplicaStanding(
        name=standing.name,
        serving=standing.serving,
        held=standing.held,
        restarts=standing.restarts,
        reason=standing.reason,
    )


def _within(request: pb.DrainReplicaRequest | pb.RestartReplicasRequest) -> float:
    if not request.HasField("within_s"):
        return DEFAULT_WITHIN_S
    within_s = request.within_s
    if not (math.isfinite(within_s) and 0 <= within_s <= MOST_WITHIN_S):
        raise InvalidRequest(f"within_s = {within_s} is outside [0, {MOST_WITHIN_S:g}]", field="within_s")
    return within_s
