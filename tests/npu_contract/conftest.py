"""Run by ``make test-npu-contract`` in an environment of its own: the real torch_npu must not be in the main one."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch_npu") else ["test_*.py"]


@pytest.fixture(scope="session")
def torch_npu() -> object:
    import torch_npu

    return torch_npu
