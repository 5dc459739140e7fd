"""The ``npu::`` operators for every test here, on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import torch_threads
from tests.rollout.kernels.npu.emulator.device import npu_operators


@pytest.fixture(scope="session", autouse=True)
def operators() -> None:
    npu_operators()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield
