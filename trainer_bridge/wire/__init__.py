"""What both clients share: records, stream assembly, error translation, weight buckets."""

from trainer_bridge.wire.assembly import Assembler, check_scores
from trainer_bridge.wire.buckets import (
    DEFAULT_BUCKET_BYTES,
    NamedTensor,
    cut,
    end_of,
    folder_update,
    plan_update,
    update_messages,
)
from trainer_bridge.wire.result import GenerateResult, SampledSequence
from trainer_bridge.wire.status import call_metadata, error_of, translated

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Assembler",
    "GenerateResult",
    "NamedTensor",
    "SampledSequence",
    "call_metadata",
    "check_scores",
    "cut",
    "end_of",
    "error_of",
    "folder_update",
    "plan_update",
    "translated",
    "update_messages",
]
