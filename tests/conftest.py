"""Models and the Ray cluster that tests share."""

from __future__ import annotations

import os

# Read once by torch, numba and huggingface_hub when they load, so set before any test imports them.
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ["HF_HUB_OFFLINE"] = "1"
# Short spins also while other work keeps the machine busy; the value is that of rollout.openmp.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from rollout.assets import DEFAULT_MODEL, prepare_model, tiny_model
from rollout.errors import ConfigError, ReplicaUnavailable


def pytest_configure() -> None:
    """Ctrl-C is tested, also where a shell started the tests in the background and had them ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The default run tries the same examples everywhere; `make test-search` draws new ones.
    hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
    hypothesis.settings.register_profile("search", max_examples=500, deadline=None)
    hypothesis.settings.load_profile(os.environ.get("ZERODRIFT_HYPOTHESIS", "fixed"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16; prepared on first use."""
    try:
        return prepare_model(DEFAULT_MODEL)
    except (ConfigError, ReplicaUnavailable) as error:
        # A wrong digest is no reason to skip: ParityError passes through.
        pytest.skip(f"{DEFAULT_MODEL} could not be prepared: {error}")


@pytest.fixture(scope="session")
def tiny_qwen3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Qwen3 in float32."""
    return tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama in float32."""
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of two CPUs without dashboard, shut down at the end; the value is ``ray.init``'s context."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray reads these in this process and in those it starts.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray

        context = ray.init(
            num_cpus=2, include_dashboard=False, namespace="zerodrift-tests", log_to_driver=False, logging_level="error"
        )
        yield context
        ray.shutdown()
