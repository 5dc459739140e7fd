"""Between ``rollout.v1`` messages and the records of ``rollout.types``, both ways.

Requests are judged on the way in (InvalidRequest names the field); responses are checked on the way out and again on
the client, where a breach is a fault of the service (RolloutError).
"""

from rollout.chunks import join_tops
from rollout.codec.fields import refuse_unknown_fields
from rollout.codec.generate import (
    GenerateEvent,
    generate_event_from_proto,
    generate_event_to_proto,
    generate_request_from_proto,
    generate_request_to_proto,
)
from rollout.codec.info import abort_from_proto, info_from_proto, info_to_proto
from rollout.codec.sampling import sampling_from_proto, sampling_to_proto
from rollout.codec.score import (
    score_request_from_proto,
    score_request_to_proto,
    score_result_from_proto,
    score_result_to_proto,
)
from rollout.codec.split import SPLIT_BYTES, row_bytes, split_event
from rollout.codec.tensor import DTYPES, tensor_from_proto, tensor_to_proto
from rollout.codec.weight_wire import (
    UpdateMessage,
    WireBucket,
    bucket_to_wire,
    head_from_wire,
    message_bytes,
    part_from_wire,
    update_from_wire,
)
from rollout.codec.weights import (
    bucket_from_proto,
    end_to_proto,
    part_from_proto,
    update_from_proto,
    update_to_proto,
    weights_from_proto,
    weights_to_proto,
)

__all__ = [
    "DTYPES",
    "SPLIT_BYTES",
    "GenerateEvent",
    "UpdateMessage",
    "WireBucket",
    "abort_from_proto",
    "bucket_from_proto",
    "bucket_to_wire",
    "end_to_proto",
    "generate_event_from_proto",
    "generate_event_to_proto",
    "generate_request_from_proto",
    "generate_request_to_proto",
    "head_from_wire",
    "info_from_proto",
    "info_to_proto",
    "join_tops",
    "message_bytes",
    "part_from_proto",
    "part_from_wire",
    "refuse_unknown_fields",
    "row_bytes",
    "sampling_from_proto",
    "sampling_to_proto",
    "score_request_from_proto",
    "score_request_to_proto",
    "score_result_from_proto",
    "score_result_to_proto",
    "split_event",
    "tensor_from_proto",
    "tensor_to_proto",
    "update_from_proto",
    "update_from_wire",
    "update_to_proto",
    "weights_from_proto",
    "weights_to_proto",
]
