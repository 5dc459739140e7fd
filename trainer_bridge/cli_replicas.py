"""Verbs of an operator: ``replicas list``, ``drain``, ``undrain``, ``restart``. TLS and token: the environment's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rollout.v1 import control_pb2 as pb

app = typer.Typer(help="Replicas of a running service.", no_args_is_help=True)
Address = Annotated[str, typer.Option(help="host:port of the service.")]
Within = Annotated[float, typer.Option(help="Seconds to wait for the samples that a replica holds.")]
Name = Annotated[str, typer.Argument(help="Name of the replica, as `replicas list` shows it.")]
DEFAULT_ADDRESS = "127.0.0.1:50051"
_CALL_S = 60.0
_START_S = 600.0
"""Beside the drain: for a replica to load its model."""


def register(parent: typer.Typer) -> None:
    """Add the verbs to the command line."""
    parent.add_typer(app, name="replicas")


@contextmanager
def _stub(address: str) -> Iterator[Any]:
    import grpc

    from rollout.errors import RolloutError
    from rollout.v1 import control_pb2_grpc
    from trainer_bridge.wire.channel import AuthorizedStub, ClientSecurity, open_channel
    from trainer_bridge.wire.request import DEFAULT_MAX_MESSAGE_BYTES

    security = ClientSecurity.from_environment()
    with open_channel(address, security, DEFAULT_MAX_MESSAGE_BYTES) as channel:
        try:
            yield AuthorizedStub(control_pb2_grpc.ControlServiceStub(channel), security)
        except grpc.RpcError as error:
            raise RolloutError(f"{address}: {error.code().name}: {error.details()}") from error


def _say(replica: pb.ReplicaStanding) -> None:
    state = "serving" if replica.serving else f"out of rotation: {replica.reason}"
    typer.echo(f"{replica.name}  holds {replica.held}  restarts {replica.restarts}  {state}")


@app.command("list")
def list_replicas(address: Address = DEFAULT_ADDRESS) -> None:
    """Where every replica stands."""
    from rollout.v1 import control_pb2 as pb

    with _stub(address) as stub:
        for replica in stub.ListReplicas(pb.ListReplicasRequest(), timeout=_CALL_S).replicas:
            _say(replica)


@app.command()
def drain(name: Name, address: Address = DEFAULT_ADDRESS, within: Within = 60.0) -> None:
    """Give a replica no new samples and wait for those it has; exit 1 when some are left."""
    from rollout.v1 import control_pb2 as pb

    with _stub(address) as stub:
        request = pb.DrainReplicaRequest(name=name, within_s=within)
        replica = stub.DrainReplica(request, timeout=within + _CALL_S).replica
    _say(replica)
    if replica.held:
        raise typer.Exit(1)


@app.command()
def undrain(name: Name, address: Address = DEFAULT_ADDRESS) -> None:
    """Put a drained replica back into rotation."""
    from rollout.v1 import control_pb2 as pb

    with _stub(address) as stub:
        _say(stub.UndrainReplica(pb.UndrainReplicaRequest(name=name), timeout=_CALL_S).replica)


@app.command()
def restart(
    name: Annotated[str, typer.Argument(help="Name of the replica; none: all, one after the other.")] = "",
    address: Address = DEFAULT_ADDRESS,
    within: Within = 60.0,
) -> None:
    """Drain, start again, bring to the present weights; samples that do not end in time go on elsewhere."""
    from rollout.v1 import control_pb2 as pb

    with _stub(address) as stub:
        count = 1 if name else len(stub.ListReplicas(pb.ListReplicasRequest(), timeout=_CALL_S).replicas)
        request = pb.RestartReplicasRequest(name=name, within_s=within)
        for response in stub.RestartReplicas(request, timeout=count * (within + _START_S)):
            _say(response.replica)
