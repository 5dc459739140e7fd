"""A recorded sample as a line of the rollout JSONL format, for the other commands."""

from __future__ import annotations

from dataclasses import replace

from rollout.types import FinishReason
from trainer_bridge.explain.source import Side, record_of
from trainer_bridge.jsonl import encode
from trainer_bridge.store.reader import RunStore


def sample_line(
    store: RunStore, run: str, step: int, request_id: str, sample_index: int, side: Side = "rollout"
) -> str:
    """One JSONL line with the bits of one side. Errors: NotFound."""
    record = record_of(store.sample(run, step, request_id, sample_index), side)
    return encode(replace(record, finish=record.finish or FinishReason.ABORTED))
