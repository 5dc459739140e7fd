"""GetServerInfo and Abort."""

from __future__ import annotations

from rollout.codec.weights import weights_from_proto, weights_to_proto
from rollout.errors import InvalidRequest
from rollout.types import ReplicaDigests, ReplicaLoad, ServerInfo
from rollout.v1 import rollout_pb2 as pb


def info_to_proto(info: ServerInfo) -> pb.GetServerInfoResponse:
    """The service's description on the wire."""
    return pb.GetServerInfoResponse(
        model=info.model,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
        manifest=dict(info.manifest),
        manifest_digest=info.manifest_digest,
        weights=weights_to_proto(info.weights),
        replicas=[_replica_to_proto(replica) for replica in info.replicas],
        paused=info.paused,
        limits=dict(info.limits),
        tensor_digests=dict(info.tensor_digests),
        replica_digests=[
            pb.ReplicaDigests(name=r.name, weights=weights_to_proto(r.weights), tensors=dict(r.tensors))
            for r in info.replica_digests
        ],
    )


def info_from_proto(message: pb.GetServerInfoResponse) -> ServerInfo:
    """The service's description."""
    return ServerInfo(
        model=message.model,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        eos_token_ids=tuple(message.eos_token_ids),
        manifest=dict(message.manifest),
        manifest_digest=message.manifest_digest,
        weights=weights_from_proto(message.weights),
        replicas=tuple(_replica_from_proto(replica) for replica in message.replicas),
        paused=message.paused,
        limits=dict(message.limits),
        tensor_digests=dict(message.tensor_digests),
        replica_digests=tuple(
            ReplicaDigests(r.name, weights_from_proto(r.weights), dict(r.tensors)) for r in message.replica_digests
        ),
    )


def _replica_to_proto(replica: ReplicaLoad) -> pb.ReplicaLoad:
    return pb.ReplicaLoad(
        name=replica.name,
        healthy=replica.healthy,
        running=replica.running,
        waiting=replica.waiting,
        free_pages=replica.free_pages,
        total_pages=replica.total_pages,
        weights=weights_to_proto(replica.weights),
    )


def _replica_from_proto(message: pb.ReplicaLoad) -> ReplicaLoad:
    return ReplicaLoad(
        name=message.name,
        healthy=message.healthy,
        running=message.running,
        waiting=message.waiting,
        free_pages=message.free_pages,
        total_pages=message.total_pages,
        weights=weights_from_proto(message.weights),
    )


def abort_from_proto(message: pb.AbortRequest) -> str:
    """The request to abort; "" stands for all of them, which the client must have said in so many words.

    Raises:
        InvalidRequest: neither a name nor ``all``, or both.
    """
    if message.all == bool(message.request_id):
        raise InvalidRequest(
            f"request_id = {message.request_id!r} with all = {message.all}; name one request or set all",
            field="request_id",
        )
    return message.request_id
