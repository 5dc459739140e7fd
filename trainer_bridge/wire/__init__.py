"""What both clients share: records, stream assembly, error translation, weight buckets."""

from trainer_bridge.wire.assembly import Assembler, check_scores
from trainer_bridge.wire.buckets import (
    DEFAULT_BUCKET_BYTES,
    cut,
    end_of,
    folder_update,
    plan_update,
    update_messages,
)
from trainer_bridge.wire.outgoing import Outgoing
from trainer_bridge.wire.result import GenerateResult, SampledSequence
from trainer_bridge.wire.status import call_metadata, error_of, translated
from trainer_bridge.wire.tensors import NamedTensor, NamedTensors, named_tensors

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Assembler",
    "GenerateResult",
    "NamedTensor",
    "NamedTensors",
    "Outgoing",
    "SampledSequence",
    "call_metadata",
    "check_scores",
    "cut",
    "end_of",
    "error_of",
    "folder_update",
    "named_tensors",
    "plan_update",
    "translated",
    "update_messages",
]
