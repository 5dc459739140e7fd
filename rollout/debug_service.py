"""``rollout.v1.DebugService``: taps and parameters of one replica, for explanations. Only registered when asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from rollout import codec
from rollout.codec.debug import tensor_parts, trace_request_from_proto, trace_to_proto
from rollout.errors import NotFound
from rollout.replica import Replica
from rollout.v1 import debug_pb2 as pb
from rollout.v1 import debug_pb2_grpc

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["DebugService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


class DebugService(debug_pb2_grpc.DebugServiceServicer):
    """Asks a replica by name."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    async def Trace(self, request: pb.TraceRequest, context: Context) -> pb.TraceResponse:
        """Replay on the engine's thread, between two steps."""
        codec.refuse_unknown_fields(request)
        wanted = trace_request_from_proto(request)
        return trace_to_proto(await self._replica(request.replica).call("trace", wanted))

    async def GetTensor(self, request: pb.GetTensorRequest, context: Context) -> AsyncIterator[pb.GetTensorResponse]:
        """A copy taken between two steps."""
        codec.refuse_unknown_fields(request)
        for part in tensor_parts(await self._replica(request.replica).call("tensor", request.name)):
            yield part

    def _replica(self, name: str) -> Replica:
        # Looked up anew each time: one that was started again stands in the old one's place.
        found = next((r for r in self._replicas if name in ("", r.name)), None)
        if found is None:
            known = ", ".join(r.name for r in self._replicas)
            raise NotFound(f"no replica {name!r}; there are {known}", field="replica")
        return found
