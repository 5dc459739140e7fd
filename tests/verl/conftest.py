"""Only where verl is installed (``make test-verl``); elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("verl"):
    collect_ignore_glob: list[str] = []
    # verl and Ray read these when they are imported.
    from examples.verl_grpo_cpu.run import environment

    os.environ.update(environment())
else:
    collect_ignore_glob = ["*.py"]


@pytest.fixture(scope="session")
def verl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model and prompts."""
    from examples.verl_grpo_cpu.task import write_model, write_prompts

    folder = tmp_path_factory.mktemp("verl")
    write_model(folder / "model")
    write_prompts(folder / "train.parquet")
    return folder


@pytest.fixture(scope="session")
def verl_ray() -> Iterator[None]:
    """One Ray cluster for all tests against verl."""
    from examples.verl_grpo_cpu.run import environment, ray_on_the_cpu

    # verl's wheel ships a package called tests, so workers find our loop by its own name.
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), variables["PYTHONPATH"]])
    with ray_on_the_cpu(variables):
        yield
