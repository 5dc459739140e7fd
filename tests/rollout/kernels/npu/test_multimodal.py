"""Image prompts on the emulated NPU: npu_fusion_attention in the tower, FA3 in the text part, equal on every path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.assets import TinyKind, tiny_model
from rollout.manifest import build_manifest
from rollout.model import load_model
from tests.engines import assert_three_ways_equal, build_engine, run
from tests.images import image_sample, random_image
from tests.rollout.kernels.npu.emulator.host import LATER, emulated

KINDS: tuple[TinyKind, ...] = ("qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("kind", KINDS)
def test_image_prompts(kind: TinyKind, tmp_path: Path) -> None:
    path = tiny_model(kind, tmp_path / kind)
    model = load_model(path, dtype=torch.bfloat16, kernels=emulated(LATER))
    assert model.vision is not None and model.vision.name == "npu_fusion"
    assert build_manifest(model)["kernels.op.vision_attention"] == "npu_fusion"
    wide, tall = random_image(1, 4, 6), random_image(2, 12, 8)
    requests = [
        image_sample([3, wide, 120], "page edge", seed=1, max_tokens=4),
        image_sample([100, tall, 2, wide], "across pages", seed=2, max_tokens=4),
        image_sample([200], "text", seed=3, max_tokens=4),
    ]
    generated = run(build_engine(model, chunk=128, batch_tokens=256, kv_tokens=8192, shuffle=1), requests)
    other = build_engine(model, chunk=37, batch_tokens=80, kv_tokens=8192)
    assert assert_three_ways_equal(model, requests, generated, other) == 12
    calls = model.vision.attention.calls
    assert calls["npu_fusion"] > 0 == calls["sdpa"] == calls["kernel_set"]
