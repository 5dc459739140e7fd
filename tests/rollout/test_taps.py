"""Taps: three paths of one model show the same bits under the same names, and a fault shows at its place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.codec.debug import trace_request_from_proto, trace_request_to_proto
from rollout.errors import InvalidRequest
from rollout.taps import LOGITS, ForwardPath, Trace, Tracer, TraceRequest
from tests.engines import fresh_model, random_prompt

IDS = random_prompt(21, 5)


def traced(path: Path, request: TraceRequest, *, eps: float | None = None) -> Trace:
    model = fresh_model(path, torch.float32)
    if eps is not None:
        model.hf.get_decoder().layers[1].input_layernorm.variance_epsilon = eps
    tracer = Tracer(model, model.kernels.decoder(model.hf, 512))
    with model.kernels.invariant_mode():
        return tracer.trace(request)


@pytest.mark.parametrize("decode_from", [None, 17])
def test_three_paths_hold_the_same_bits(tiny_qwen3_path: Path, decode_from: int | None) -> None:
    trained = traced(tiny_qwen3_path, TraceRequest(IDS, path="training"))
    paged = traced(tiny_qwen3_path, TraceRequest(IDS, path="modules", decode_from=decode_from, company=(IDS[:9],)))
    fused = traced(tiny_qwen3_path, TraceRequest(IDS, path="fused", decode_from=decode_from))
    assert list(trained.digests) == list(paged.digests)
    for tap, rows in trained.digests.items():
        assert len(rows) == len(IDS) and rows.all(), tap
        assert np.array_equal(rows, paged.digests[tap]), tap
    assert {"layers.0.keys", "layers.1.values", "norm", LOGITS} <= fused.digests.keys() <= trained.digests.keys()
    assert all(np.array_equal(rows, trained.digests[tap]) for tap, rows in fused.digests.items())


def test_a_fault_shows_first_at_its_place(tiny_qwen3_path: Path) -> None:
    for within, first in ((None, "layers.1.keys"), ("layers.1.", "layers.1.input_layernorm")):
        request = TraceRequest(IDS, path="training", within=within)
        sound, wrong = traced(tiny_qwen3_path, request), traced(tiny_qwen3_path, request, eps=1e-4)
        unequal = [tap for tap, rows in sound.digests.items() if not np.array_equal(rows, wrong.digests[tap])]
        assert unequal[0] == first


def test_tensors_and_logits_come_where_asked(tiny_qwen3_path: Path) -> None:
    request = TraceRequest(IDS, path="training", logits_from=18, within="layers.0.", tensors=("embed", LOGITS))
    trace = traced(tiny_qwen3_path, request)
    assert trace.tensors["embed"].shape == (21, 64)
    assert trace.tensors[LOGITS].shape == (3, 64)
    assert all(tap.startswith("layers.0.") or tap == "embed" or tap == LOGITS for tap in trace.digests)


def test_positions_matter(tiny_qwen3_path: Path) -> None:
    plain = traced(tiny_qwen3_path, TraceRequest(IDS, path="training"))
    moved = traced(tiny_qwen3_path, TraceRequest(IDS, path="training", positions=tuple(range(1, 22))))
    assert not np.array_equal(plain.digests["rope.cos"], moved.digests["rope.cos"])
    assert np.array_equal(plain.digests["embed"], moved.digests["embed"])


def test_refusals(tiny_qwen3_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least one token"):
        traced(tiny_qwen3_path, TraceRequest(()))
    model = fresh_model(tiny_qwen3_path, torch.float32)
    with pytest.raises(InvalidRequest, match="no fused forward"):
        Tracer(model).trace(TraceRequest(IDS, path="fused"))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (TraceRequest((3, 64)), "token_ids"),
        (TraceRequest((3, -1)), "token_ids"),
        (TraceRequest(IDS * 30), "token_ids"),
        (TraceRequest(IDS, company=((3,), (99,))), "company"),
        (TraceRequest(IDS, company=((),)), "company"),
        (TraceRequest(IDS, positions=(1, 2)), "positions"),
        (TraceRequest(IDS, positions=tuple(range(500, 521))), "positions"),
        (TraceRequest(IDS, logits_from=22), "logits_from"),
        (TraceRequest(IDS, chunk=0), "chunk"),
    ],
)
@pytest.mark.parametrize("path", ["fused", "modules", "training"])
def test_what_kernels_could_not_survive_is_refused(
    tiny_qwen3_path: Path, request_: TraceRequest, field: str, path: ForwardPath
) -> None:
    """A row beyond a table would be read from memory that is not the table's."""
    model = fresh_model(tiny_qwen3_path, torch.float32, context_length=512)
    tracer = Tracer(model, model.kernels.decoder(model.hf, 512))
    with pytest.raises(InvalidRequest) as caught:
        tracer.trace(dataclasses.replace(request_, path=path))
    assert caught.value.field == field


@pytest.mark.parametrize("path", ["fused", "modules"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_hold_the_bits_of_one_pass(tiny_qwen3_path: Path, path: ForwardPath, chunk: int) -> None:
    whole = traced(tiny_qwen3_path, TraceRequest(IDS, path=path, decode_from=18))
    parts = traced(tiny_qwen3_path, TraceRequest(IDS, path=path, decode_from=18, chunk=chunk))
    assert list(whole.digests) == list(parts.digests)
    assert all(np.array_equal(rows, parts.digests[tap]) for tap, rows in whole.digests.items())


def test_a_request_goes_over_the_wire_whole() -> None:
    full = TraceRequest(IDS, tuple(range(21)), 3, "modules", 4, ((1, 2),), "layers.0.", ("embed",), 5)
    assert trace_request_from_proto(trace_request_to_proto(full, "replica-1")) == full
    assert trace_request_from_proto(trace_request_to_proto(TraceRequest(IDS))) == TraceRequest(IDS)
