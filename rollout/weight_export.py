"""Weights on their way out of a replica, in buckets: how one that was started again gets what the others serve."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.model import SharedModel
from rollout.types import TensorChunk
from rollout.weights import dtype_name, tensor_bytes


@dataclass(frozen=True, slots=True)
class ExportPlace:
    """Where the next bucket begins."""

    tensor: int = 0
    """in order of the model's parameters"""
    offset: int = 0
    """bytes of it that went out already"""


def export_bucket(
    model: SharedModel, place: ExportPlace, most_bytes: int
) -> tuple[list[TensorChunk], ExportPlace | None]:
    """Copies of at most ``most_bytes`` bytes from ``place`` on, and where the next bucket begins; None at the end."""
    parameters = list(model.parameters())
    chunks: list[TensorChunk] = []
    room = most_bytes
    for number in range(place.tensor, len(parameters)):
        name, parameter = parameters[number]
        data = tensor_bytes(parameter)
        start = place.offset if number == place.tensor else 0
        part = bytes(data[start : start + room])
        chunks.append(TensorChunk(name, dtype_name(parameter.dtype), tuple(parameter.shape), start, part))
        room -= len(part)
        if start + len(part) < len(data):
            return chunks, ExportPlace(number, start + len(part))
        if room == 0 and number + 1 < len(parameters):
            return chunks, ExportPlace(number + 1)
    return chunks, None
