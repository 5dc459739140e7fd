"""Checks and assignments shared by all messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from rollout.errors import InvalidRequest, RolloutError
from rollout.temperature import checked_temperature
from rollout.v1 import rollout_pb2 as pb

MAX_TOKEN_ID = 2**31 - 1
"""Ids are int32 from here on."""


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """Refuse a request that carries anything this server would ignore, at any depth.

    A field the server does not know is an option it does not honour; dropping it would change what the client gets.

    Raises:
        InvalidRequest: names the message type and the field number.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        name = message.DESCRIPTOR.full_name
        raise InvalidRequest(
            f"{name} has a field with number {number} (wire type {unknown[0].wire_type}) this server does not know; "
            "it would be ignored, so it is refused: use a client built for this server's rollout.v1",
            field=f"{path}.{number}" if path else str(number),
        )
    for descriptor in message.DESCRIPTOR.fields:
        # Only messages are looked at: a look at bytes, such as 16 MiB of weights, copies them.
        if descriptor.message_type is None:
            continue
        value = getattr(message, descriptor.name)
        here = f"{path}.{descriptor.name}" if path else descriptor.name
        if isinstance(value, Message):
            if message.HasField(descriptor.name):
                refuse_unknown_fields(value, here)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if isinstance(item, Message):
                    refuse_unknown_fields(item, f"{here}[{key!r}]")
        else:
            for index, item in enumerate(value):
                refuse_unknown_fields(item, f"{here}[{index}]")


def assign(message: Message, prefix: str = "", **values: object) -> None:
    """Set scalar fields of a message that goes out; None leaves the field unset.

    Raises:
        InvalidRequest: a value has no place in the field's wire type; ``field`` is prefix + name.
    """
    for name, value in values.items():
        if value is None:
            continue
        truth = message.DESCRIPTOR.fields_by_name[name].type == FieldDescriptor.TYPE_BOOL
        if isinstance(value, bool) and not truth:
            raise InvalidRequest(
                f"{prefix}{name} = {value!r} does not fit the wire type: a truth value is none", field=prefix + name
            )
        if truth and isinstance(value, int | float) and value not in (0, 1):
            raise InvalidRequest(f"{prefix}{name} = {value!r} must be true or false", field=prefix + name)
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{prefix}{name} = {value!r} does not fit the wire type: {error}", field=prefix + name
            ) from error


def extend(container: Any, values: Iterable[object], field: str) -> None:
    """Append to a repeated field.

    Raises:
        InvalidRequest: a value has no place in the field's wire type.
    """
    if isinstance(values, str | bytes):
        # Its characters would be taken for the items.
        raise InvalidRequest(f"{field} is {values!r:.60}, must be a list: write [{values!r:.60}]", field=field)
    try:
        container.extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{field} holds a value that does not fit the wire type: {error}", field=field) from error


def token_ids(message: pb.TokenIds, field: str) -> tuple[int, ...]:
    """Ids of a request: at least one, each in [0, 2^31). Whether each is in the vocabulary, the backend says."""
    ids = tuple(message.ids)
    check_token_ids(ids, field)
    return ids


def check_token_ids(ids: Sequence[int], field: str) -> None:
    """Refuse an empty list and ids outside [0, 2^31)."""
    if not ids:
        raise InvalidRequest(f"{field} is empty; send at least one token id (the service adds no BOS)", field=field)
    if min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID:
        return
    index = next(i for i, value in enumerate(ids) if not 0 <= value <= MAX_TOKEN_ID)
    raise InvalidRequest(
        f"{field}[{index}] = {ids[index]} is no token id; ids lie in [0, vocab_size) and never above {MAX_TOKEN_ID}",
        field=f"{field}[{index}]",
    )


def check_temperature(value: float, field: str) -> float:
    """The value as it came, after ``checked_temperature``: rounding is the backend's."""
    checked_temperature(value, field)
    return value


def check_count(value: int, field: str) -> int:
    """Refuse negative numbers; the upper limit is the backend's."""
    if value < 0:
        raise InvalidRequest(f"{field} = {value} must be >= 0", field=field)
    return value


def malformed(message: str, field: str = "") -> RolloutError:
    """The error for a response that breaks the protocol: a fault of the service, never of the request."""
    return RolloutError(f"malformed response: {message}", field=field)
