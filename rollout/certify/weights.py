"""Family: the weights travel and come back: chunked, staged, proven, committed, the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.certify.subject import Family, Outcome, Subject
from rollout.types import TensorChunk, WeightState, WeightUpdate
from rollout.weight_stage import WeightStage
from rollout.weights import digest_of, dtype_name, root_digest, tensor_bytes

_CHUNK_BYTES = 1 << 20


def _chunks(name: str, tensor: torch.Tensor) -> Iterator[TensorChunk]:
    data = tensor_bytes(tensor)
    for start in range(0, len(data), _CHUNK_BYTES):
        part = bytes(data[start : start + _CHUNK_BYTES])
        yield TensorChunk(name, dtype_name(tensor.dtype), tuple(tensor.shape), start, part)


def _digests(subject: Subject) -> dict[str, bytes]:
    return {name: digest_of(name, parameter) for name, parameter in subject.model.parameters()}


@torch.no_grad()
def _checks(subject: Subject) -> Iterator[Outcome]:
    parameters, before = dict(subject.model.parameters()), _digests(subject)
    root = root_digest(before)
    stage = WeightStage(subject.model, WeightUpdate(1, root, len(parameters)), WeightState(0, root))
    for name, parameter in parameters.items():
        for chunk in _chunks(name, parameter):
            stage.add(chunk)
    stage.verify()
    state = stage.commit()
    if subject.decoder is not None:
        subject.decoder.refresh()
    yield Outcome("root digest after the round trip", 1, int(state.digest != root))
    for name, digest in _digests(subject).items():
        yield Outcome(name, 1, int(digest != before[name]))


@torch.no_grad()
def _control(subject: Subject) -> Outcome:
    """One bit of one tensor turned on the way, in a copy: its digest must change, and with it the root."""
    name, parameter = min(subject.model.parameters(), key=lambda item: item[1].numel())
    turned = parameter.detach().clone()
    turned.view(-1).view(torch.uint8)[0] ^= 1
    equal = root_digest({name: digest_of(name, turned)}) == root_digest({name: digest_of(name, parameter)})
    return Outcome(f"one bit of {name} turned", 1, int(not equal))


FAMILY = Family("weights", "weights by the wire format and back", _checks, _control)
