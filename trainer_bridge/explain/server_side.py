"""A running service as a side: manifest and digests by its main service, taps and tensors by its Debug service."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Self, cast

import torch

from rollout.codec.debug import tensor_from_bytes, trace_from_proto, trace_request_to_proto
from rollout.errors import InvalidRequest, NotFound, UnsupportedFeature
from rollout.taps import Trace, TraceRequest
from rollout.types import Float32Array
from rollout.v1 import debug_pb2 as pb
from rollout.v1 import debug_pb2_grpc
from trainer_bridge.client import RolloutClient
from trainer_bridge.collect import records_of
from trainer_bridge.replay import replay_request
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.wire import translated
from trainer_bridge.wire.channel import PLAIN, AuthorizedStub, ClientSecurity, open_channel
from trainer_bridge.wire.request import DEFAULT_MAX_MESSAGE_BYTES

TIMEOUT_S = 300.0


class ServerSide:
    """One replica of a service. Close it, or use it as a context manager."""

    def __init__(
        self, address: str, *, replica: str = "", name: str = "rollout", security: ClientSecurity = PLAIN
    ) -> None:
        """``replica``: the one that sampled; empty: the first. The service asks for the role control."""
        self.name = name
        self._replica = replica
        self._client = RolloutClient(address, security=security)
        self._info = self._client.info(tensor_digests=True)
        self._channel = open_channel(address, security, DEFAULT_MAX_MESSAGE_BYTES)
        stub = AuthorizedStub(debug_pb2_grpc.DebugServiceStub(self._channel), security)
        self._stub = cast("debug_pb2_grpc.DebugServiceStub", stub)
        self.paths: tuple[str, ...] = ("fused", "modules") if self._has_fused() else ("modules",)

    def _has_fused(self) -> bool:
        try:
            self.trace(TraceRequest((0,), path="fused"))
        except InvalidRequest:
            return False
        return True

    def __enter__(self) -> Self:
        """The side itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close both channels."""
        self._channel.close()
        self._client.close()

    def mode(self) -> contextlib.AbstractContextManager[None]:
        """See ``Side``; nothing of it is in this process."""
        return contextlib.nullcontext()

    def manifest(self) -> Mapping[str, str]:
        """See ``Side``."""
        return self._info.manifest

    def tensor_digests(self) -> Mapping[str, str]:
        """See ``Side``."""
        return self._info.tensor_digests

    def tensor(self, name: str) -> torch.Tensor | None:
        """See ``Side``."""
        try:
            with translated():
                parts = list(
                    self._stub.GetTensor(pb.GetTensorRequest(name=name, replica=self._replica), timeout=TIMEOUT_S)
                )
        except NotFound:
            return None
        return tensor_from_bytes(parts[0].dtype, parts[0].shape, b"".join(part.data for part in parts))

    def trace(self, request: TraceRequest) -> Trace:
        """See ``Side``.

        Raises:
            UnsupportedFeature: the service does not serve taps.
        """
        try:
            with translated():
                return trace_from_proto(
                    self._stub.Trace(trace_request_to_proto(request, self._replica), timeout=TIMEOUT_S)
                )
        except UnsupportedFeature as error:
            raise UnsupportedFeature(
                "the service does not show its taps; start it with server.debug=true, or explain with --rollout-model"
            ) from error

    def again(self, record: RolloutRecord) -> RolloutRecord | None:
        """See ``Side``; by whichever replica is free."""
        (found,) = records_of(self._client.generate_many([replay_request(record, 0)]))
        return found

    def stock(self, record: RolloutRecord) -> Float32Array | None:
        """See ``Side``; a service runs its own forward only."""
        return None
