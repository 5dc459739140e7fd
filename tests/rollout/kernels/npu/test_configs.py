"""The shipped NPU settings: they load, fit the kernels and the memory, and the documents say what the tables say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollout.config import load_settings
from rollout.kernels.npu import environment
from rollout.kernels.npu.capabilities import PAGE_SIZE
from rollout.kernels.npu.layout import QUERY_TILE
from rollout.kernels.npu.plans import PLANS
from rollout.kernels.npu.store import MAX_ELEMENTS
from rollout.replica import actor_options

ROOT = Path(__file__).parents[4]
CONFIGS = sorted((ROOT / "configs/npu").glob("*.yaml"))
LAYERS = {"0.6b": 28, "1.7b": 28, "8b": 36}
WEIGHTS_GB = {"0.6b": 1.5, "1.7b": 4.1, "8b": 16.4}
DEVICE_GB = 64


def test_every_model_on_every_chip() -> None:
    names = {path.stem for path in CONFIGS}
    assert names == {f"qwen3-{size}-{chip}" for size in LAYERS for chip in ("a2", "a3")}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_settings(path: Path) -> None:
    settings, size = load_settings(path), path.stem.split("-")[1]
    engine = settings.engine
    assert settings.kernels.name == "npu" and engine.page_size == PAGE_SIZE
    assert engine.chunk_size % QUERY_TILE == 0 and settings.worker.resources == {"NPU": 1}
    assert engine.kv_cache_tokens * 8 * 128 < MAX_ELEMENTS
    kv = engine.kv_cache_tokens * LAYERS[size] * 8 * 128 * 2 * 2
    assert f"{kv / 1e9:.1f} GB in all" in path.read_text() and kv / 1e9 + WEIGHTS_GB[size] < 0.8 * DEVICE_GB
    environ = actor_options(settings)["runtime_env"]["env_vars"]
    assert environment.wrong(environ) == []


def test_workers_of_the_cpu_set_get_no_npu_variables() -> None:
    environ = actor_options(load_settings(None, ["kernels.name=cpu"]))["runtime_env"]["env_vars"]
    assert not set(environment.required()) & set(environ)


def test_the_page_and_the_image_have_the_table() -> None:
    page, image = ((ROOT / name).read_text() for name in ("docs/npu.md", "deploy/docker/Dockerfile.npu"))
    table = dict(re.findall(r"^\| ([A-Z_]+) \| (\S+) \|$", page, re.M))
    assert table == environment.required()
    assert all(f"{name}={value}" in image for name, value in environment.required().items())
    assert all(f"| {plan.name} |" in page for plan in PLANS)
