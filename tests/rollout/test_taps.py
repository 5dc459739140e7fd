"""Taps: three paths of one model show the same bits under the same names, and a fault shows at its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.errors import InvalidRequest
from rollout.taps import LOGITS, Trace, Tracer, TraceRequest
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
