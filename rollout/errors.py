"""One exception tree; every error knows its gRPC status code.

    RolloutError                    INTERNAL
    ├── InvalidRequest              INVALID_ARGUMENT     a field has a value that can never be served
    │   └── ConfigError             INVALID_ARGUMENT     settings that cannot start a service
    ├── UnsupportedFeature          UNIMPLEMENTED        the model, kernel set or engine lacks what was asked for
    ├── NotFound                    NOT_FOUND            no live request or replica by that name
    ├── DuplicateRequest            ALREADY_EXISTS       a live request already has this id
    ├── CapacityExceeded            RESOURCE_EXHAUSTED   queue or KV budget is full; try again later
    ├── WeightUpdateError           FAILED_PRECONDITION  an update failed its checks; the old version still serves
    ├── CertificateError            FAILED_PRECONDITION  strict serving without a certificate that matches and holds
    ├── ParityError                 DATA_LOSS            two sides that must hold the same bits do not
    ├── ReplicaUnavailable          UNAVAILABLE          a worker died or is fenced
    │   └── WeightsMoved            ABORTED              a begun sample cannot go on: its weights are no longer served
    ├── Unauthenticated             UNAUTHENTICATED      no token, or one that is not known
    ├── PermissionDenied            PERMISSION_DENIED    the caller is known and may not do this
    └── RequestAborted              ABORTED              ended by the service, not by its own limits

Messages name the value, the limit and the way out. ``field`` is the request field at fault, for BadRequest details.
"""

from __future__ import annotations

from typing import ClassVar


class RolloutError(Exception):
    """Root of the tree. ``code`` is the name of a ``grpc.StatusCode``; ``reason`` goes into ``ErrorInfo``."""

    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross Ray by pickle; the default would drop the keyword-only field.
        return (_rebuild, (type(self), self.message, self.field))


def _rebuild(cls: type[RolloutError], message: str, field: str) -> RolloutError:
    return cls(message, field=field)


class InvalidRequest(RolloutError):
    """A request field holds a value that can never be served."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"


class ConfigError(InvalidRequest):
    """Settings that cannot start a service."""

    reason = "INVALID_CONFIG"


class UnsupportedFeature(RolloutError):
    """The model, the kernel set or the engine lacks a named feature."""

    code = "UNIMPLEMENTED"
    reason = "UNSUPPORTED_FEATURE"


class NotFound(RolloutError):
    """No live request, replica or version by that name."""

    code = "NOT_FOUND"
    reason = "NOT_FOUND"


class DuplicateRequest(RolloutError):
    """A live request already has this id."""

    code = "ALREADY_EXISTS"
    reason = "DUPLICATE_REQUEST"


class CapacityExceeded(RolloutError):
    """The queue or the KV budget is full; the same call may succeed later."""

    code = "RESOURCE_EXHAUSTED"
    reason = "CAPACITY_EXCEEDED"


class WeightUpdateError(RolloutError):
    """An update failed its checks; the version served before it goes on serving."""

    code = "FAILED_PRECONDITION"
    reason = "WEIGHT_UPDATE_REFUSED"


class CertificateError(RolloutError):
    """Strict serving was asked for without a certificate that matches this machine and holds."""

    code = "FAILED_PRECONDITION"
    reason = "CERTIFICATE_REQUIRED"


class ParityError(RolloutError):
    """Two sides that must hold the same bits do not."""

    code = "DATA_LOSS"
    reason = "PARITY_BROKEN"


class ReplicaUnavailable(RolloutError):
    """A worker died, hangs or is fenced off."""

    code = "UNAVAILABLE"
    reason = "REPLICA_UNAVAILABLE"


class Unauthenticated(RolloutError):
    """The call carries no token, or one that is not known."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(RolloutError):
    """The caller is known, and may not do this."""

    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class WeightsMoved(ReplicaUnavailable):
    """A begun sample cannot go on: the weights that sampled it are no longer served. Submit it anew."""

    code = "ABORTED"
    reason = "WEIGHTS_MOVED"


class RequestAborted(RolloutError):
    """The service ended the request before its own limits did."""

    code = "ABORTED"
    reason = "REQUEST_ABORTED"
