"""gRPC statuses back to the errors of ``rollout.errors``: the one border where grpc's own errors end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from rollout.errors import (
    CapacityExceeded,
    DuplicateRequest,
    InvalidRequest,
    NotFound,
    ParityError,
    PermissionDenied,
    ReplicaUnavailable,
    RequestAborted,
    RolloutError,
    Unauthenticated,
    UnsupportedFeature,
    WeightUpdateError,
)
from rollout.tracing import KEY, traceparent

_BY_CODE: dict[grpc.StatusCode, type[RolloutError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedFeature,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: WeightUpdateError,
    grpc.StatusCode.DATA_LOSS: ParityError,
    grpc.StatusCode.UNAVAILABLE: ReplicaUnavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.ABORTED: RequestAborted,
    grpc.StatusCode.CANCELLED: RequestAborted,
    grpc.StatusCode.DEADLINE_EXCEEDED: RequestAborted,
}
_METADATA_VALUE = re.compile(r"[\x21-\x7e]{1,128}")


_CLOSED = "this client was closed; make another one"
_CHANNEL_CLOSED = ("Channel closed", "closed channel")
"""In what grpc says of it, as a status or as a ValueError."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise what gRPC raises in the body as the error the service meant; the original is its cause.

    Where this side ended the call by closing the client, that is ``RequestAborted``. grpc.aio then raises
    CancelledError, which would look to the caller as if somebody had cancelled its task; only where somebody has, it
    stays one.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error) from error
    except grpc.aio.UsageError as error:
        raise RequestAborted(_CLOSED) from error
    except ValueError as error:
        if not any(words in str(error) for words in _CHANNEL_CLOSED):
            raise
        raise RequestAborted(_CLOSED) from error
    except asyncio.CancelledError as error:
        if _task_cancelled():
            raise
        raise RequestAborted(_CLOSED) from error


def _task_cancelled() -> bool:
    with suppress(RuntimeError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False


def error_of(error: grpc.RpcError) -> RolloutError:
    """The same class, message and field that the service raised; without its details, a class chosen by status code."""
    call = cast("grpc.Call", error)
    code, message = call.code(), call.details() or ""
    status = _rich_status(call)
    if status is not None:
        info = error_details_pb2.ErrorInfo()
        for detail in status.details:
            if detail.Unpack(info):
                kind = _by_reason().get(info.reason)
                if kind is not None:
                    return kind(status.message, field=info.metadata.get("field", ""))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        # gRPC's size limit: unlike a full queue, the same call will never succeed.
        return InvalidRequest(f"{message}; send less in one message, or raise max_message_bytes on the receiving side")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestAborted(f"{message or 'deadline exceeded'}; raise the client's timeout_s")
    if code is grpc.StatusCode.CANCELLED and any(words in message for words in _CHANNEL_CLOSED):
        return RequestAborted(_CLOSED)
    return _BY_CODE.get(code, RolloutError)(f"{code.name}: {message}")


def _rich_status(call: grpc.Call) -> status_pb2.Status | None:
    try:
        return cast("status_pb2.Status | None", rpc_status.from_call(call))
    except ValueError:
        # Details that contradict the status line were not written by this service.
        return None


def _by_reason() -> dict[str, type[RolloutError]]:
    kinds: dict[str, type[RolloutError]] = {}
    pending: list[type[RolloutError]] = [RolloutError]
    while pending:
        kind = pending.pop()
        # Ray derives classes of its own from ours to raise them; those cannot be built from text.
        if kind.__module__ == RolloutError.__module__:
            kinds[kind.reason] = kind
        pending.extend(kind.__subclasses__())
    return kinds


def call_metadata(request_id: str, client_id: str = "") -> tuple[tuple[str, str], ...]:
    """Metadata of a call: the request's id, for the server's log, where a header can hold it; the client; the trace.

    Raises:
        InvalidRequest: a client id that a header cannot hold.
    """
    metadata = (("x-request-id", request_id),) if _METADATA_VALUE.fullmatch(request_id) else ()
    if client_id:
        if not _METADATA_VALUE.fullmatch(client_id):
            raise InvalidRequest(
                f"client_id = {client_id!r} must be 1 to 128 visible ASCII characters", field="client_id"
            )
        metadata = (*metadata, ("x-client-id", client_id))
    traced = traceparent()
    return (*metadata, (KEY, traced)) if traced else metadata
