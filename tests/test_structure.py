"""House rules that a reader relies on: short files and functions, a docstring a module, no drawer called utils."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("rollout", "trainer_bridge", "benchmarks")
MAX_FILE, MAX_TEST_FILE, MAX_FUNCTION = 400, 500, 60


def sources(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if "v1" not in path.relative_to(ROOT).parts]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def long_functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{node.name} ({length} lines)"


def test_the_packages_are_seen() -> None:
    seen = {name(path) for path in sources(*PACKAGES)}
    assert {"rollout/types.py", "rollout/config.py", "trainer_bridge/__init__.py"} <= seen
    assert "rollout/v1/rollout_pb2.py" not in seen


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=name)
def test_module(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert text.count("\n") <= MAX_FILE, f"over {MAX_FILE} lines"
    assert list(long_functions(tree)) == [], f"functions over {MAX_FUNCTION} lines"
    # An empty __init__ has nothing to explain.
    assert ast.get_docstring(tree) or not tree.body, "no module docstring"


@pytest.mark.parametrize("path", sources("tests"), ids=name)
def test_test_file(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_TEST_FILE, f"over {MAX_TEST_FILE} lines"
    assert ast.get_docstring(ast.parse(text)) or not text.strip(), "no module docstring"


def test_nothing_is_named_utils() -> None:
    everything = [path for folder in (*PACKAGES, "tests") for path in (ROOT / folder).rglob("*")]
    drawers = {"utils", "util", "misc", "helpers", "common"}
    assert [name(path) for path in everything if path.stem in drawers] == []


def test_a_long_function_is_seen() -> None:
    body = "\n".join(f"    x{i} = {i}" for i in range(MAX_FUNCTION))
    assert list(long_functions(ast.parse(f"def long() -> None:\n{body}"))) == [f"long ({MAX_FUNCTION + 1} lines)"]
    assert list(long_functions(ast.parse(f"def short() -> None:\n{body.rpartition(chr(10))[0]}"))) == []


def test_no_weights_are_committed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    assert [line for line in listed.stdout.splitlines() if line.endswith((".safetensors", ".gguf", ".bin"))] == []


def test_the_verl_environment_is_pinned_whole() -> None:
    """Left to choose, pip tries old releases for an hour; torch alone is pinned by the Makefile, before all others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pins = (ROOT / "tests/verl/constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_normal(line.split("==")[0]) for line in pins if "==" in line}
    asked = [*project["dependencies"], *extras["verl"], *extras["verl-test"]]
    wanted = {_normal(re.split(r"[\[<>=~! ]", line)[0]) for line in asked}
    assert wanted - pinned == {"torch"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
