"""Models of the parity tests: two architectures with pages of 16 in both dtypes, and one that only exists here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout.model import SharedModel
from tests.engines import shared_model, torch_threads
from tests.explain.qwen2 import tiny_qwen2

KINDS = ("qwen3-fp32", "qwen3-bf16", "llama-fp32", "llama-bf16")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for two threads; tests of thread counts set their own."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="session", params=KINDS)
def path_and_dtype(
    request: pytest.FixtureRequest, tiny_qwen3_path: Path, tiny_llama_path: Path
) -> tuple[Path, torch.dtype]:
    kind, dtype = request.param.split("-")
    path = tiny_qwen3_path if kind == "qwen3" else tiny_llama_path
    return path, torch.float32 if dtype == "fp32" else torch.bfloat16


@pytest.fixture(scope="session")
def model(path_and_dtype: tuple[Path, torch.dtype]) -> SharedModel:
    """Shared and never changed."""
    return shared_model(*path_and_dtype)


@pytest.fixture(scope="session")
def qwen3(tiny_qwen3_path: Path) -> SharedModel:
    """In float32, where the least disorder shows."""
    return shared_model(tiny_qwen3_path, torch.float32)


@pytest.fixture(scope="session")
def tiny_qwen2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2: biases on q, k and v, and 3 query heads a KV head."""
    return tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny-qwen2")
