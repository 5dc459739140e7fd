"""Nothing that comes from elsewhere is unpickled or executed: by a search for whatever could."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("rollout", "trainer_bridge")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "v1" not in path.relative_to(ROOT).parts
]
FORBIDDEN_MODULES = {
    "pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "code",
    "codeop",
    "ctypes.util",
    "jsonpickle",
}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "np.load", "numpy.load", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "pd.read_pickle", "pandas.read_pickle",
}  # fmt: skip
FORBIDDEN_KEYWORDS = {("shell", True), ("trust_remote_code", True), ("allow_pickle", True), ("weights_only", False)}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute, "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}" if dotted(node.value) else ""
    return node.id if isinstance(node, ast.Name) else ""


def dangers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in FORBIDDEN_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            if dotted(node.func) in FORBIDDEN_CALLS:
                yield dotted(node.func)
            for keyword in node.keywords:
                value = keyword.value
                if isinstance(value, ast.Constant) and (keyword.arg, value.value) in FORBIDDEN_KEYWORDS:
                    yield f"{keyword.arg}={value.value}"


def test_no_module_does() -> None:
    found = {
        str(path.relative_to(ROOT)): list(dangers(ast.parse(path.read_text(encoding="utf-8")))) for path in SOURCES
    }
    assert len(found) > 100 and {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from marshal import loads", "eval(text)", "torch.load(path)", "yaml.load(text)",
        "run(words, shell=True)", "AutoModel.from_pretrained(path, trust_remote_code=True)", "f(allow_pickle=True)",
    ],
)  # fmt: skip
def test_each_danger_is_seen(line: str) -> None:
    assert len(set(dangers(ast.parse(line)))) >= 1
    assert list(dangers(ast.parse("hf.eval(); re.compile(x); yaml.safe_load(x); f(shell=False)"))) == []


def test_plugins_are_chosen_by_the_operator_only() -> None:
    """Modules imported by name: of names in the program and its settings, never in a request."""
    importing = {str(path.relative_to(ROOT)) for path in SOURCES if "import_module" in path.read_text(encoding="utf-8")}
    assert importing == {
        "rollout/kernels/npu/lines.py",
        "rollout/kernels/npu/package_ops.py",
        "rollout/kernels/registry.py",
        "trainer_bridge/store/sinks.py",
    }
