"""What an engine's step reports."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.errors import RolloutError
from rollout.types import SampleEvent, SequenceScore


@dataclass(frozen=True, slots=True)
class ScoreEvent:
    """A scored sequence is complete."""

    sample_id: str
    score: SequenceScore
    weight_version: int


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A sequence ended with a typed error; its pages are free again."""

    sample_id: str
    error: RolloutError


Event = SampleEvent | ScoreEvent | FailureEvent


def is_end(event: Event) -> bool:
    """Whether nothing more of this sample will come."""
    return not isinstance(event, SampleEvent) or event.summary is not None
