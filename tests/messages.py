"""Messages of an update as the generated class sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollout.v1 import rollout_pb2 as pb
from trainer_bridge.wire import update_messages


def parsed_messages(*args: Any) -> Iterator[pb.UpdateWeightsRequest]:
    """``update_messages``, parsed."""
    return map(pb.UpdateWeightsRequest.FromString, update_messages(*args))
