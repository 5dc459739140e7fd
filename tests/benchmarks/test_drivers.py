"""Drivers of our own engine: exact and inexact are what they say; the floor counts the right products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.drivers.channel import Job, checked
from benchmarks.drivers.floor import FloorEngine, necessary_rows, prefill_batches
from benchmarks.drivers.hf_generate import HuggingFaceEngine
from benchmarks.drivers.zerodrift import ZerodriftEngine
from benchmarks.models import RANDOM_MODELS, model_folder, write_random_model
from rollout.kernels.cpu import dot, linear

JOB = Job([[5, 6, 7, 8], [9, 8, 7, 6]], samples=2, new_tokens=5, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder("tiny", cache_dir=tmp_path_factory.mktemp("cache"))


def config(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"model": str(folder), "threads": torch.get_num_threads(), "kv_tokens": 1024} | fields


def plans(engine: ZerodriftEngine) -> set[linear.ProductPlan]:
    decoder: Any = engine._engine._decoder
    return {each._plan for layer in decoder._layers for each in layer.linears()} | {decoder._head._plan}


def test_models_are_the_same_bytes_every_time(folder: Path, tmp_path: Path) -> None:
    write_random_model(RANDOM_MODELS["tiny"].config, tmp_path / "again")
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()


def test_exact_engine_keeps_what_packing_would_change(folder: Path) -> None:
    exact = ZerodriftEngine(config(folder))
    samples = exact.run(JOB)
    checked(JOB, samples)
    assert exact.facts()["exact"] is True
    # The same job again meets a filled prefix cache; the bits are the same.
    assert exact.run(JOB) == samples
    assert ZerodriftEngine(config(folder, digests=True)).run(JOB) == samples


def test_inexact_engine_pads_nothing(folder: Path) -> None:
    measured = linear.plan_product
    inexact = ZerodriftEngine(config(folder, exact=False))
    checked(JOB, inexact.run(JOB))
    assert inexact.facts()["exact"] is False
    assert all(plan.packed_rows == 1 or plan.block not in (None, *dot.BLOCKS) for plan in plans(inexact))
    assert linear.plan_product is measured, "models built later must be exact again"


def test_generate_of_transformers(folder: Path) -> None:
    engine = HuggingFaceEngine(config(folder))
    checked(JOB, engine.run(JOB))
    ragged = Job([[5, 6, 7, 8], [9]], samples=1, new_tokens=3, seed=1)
    checked(ragged, engine.run(ragged))


def test_floor_multiplies_what_the_work_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floor = FloorEngine(config(folder))
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(floor, "_forward", lambda rows: calls.append((rows, 0)))
    monkeypatch.setattr(floor, "_forward_head", lambda rows: calls.append((0, rows)))
    floor.run(JOB)
    assert calls == [(8, 0), (0, 2)] + [(4, 0), (0, 4)] * 4
    assert prefill_batches(1100, 512) == [512, 512, 76]
    assert necessary_rows([[1, 2, 3], [1, 2, 4]]) == 4
    assert necessary_rows([[1, 2, 3]]) == 3
    assert necessary_rows([[1, 2], [1, 2]]) == 2
