"""The command line: verbs, exit codes, JSON beside tables, and that the set of verbs is a decision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout import cli
from rollout.cli_certify import register as register_certify
from trainer_bridge.cli import register

VERBS = {
    "certify", "compare", "config", "dashboard", "demo", "doctor", "explain", "explain-recorded", "generate", "health",
    "kernels",
    "manifest", "replay", "replicas", "runs", "serve", "submit", "token", "weights",
}  # fmt: skip
if not any(c.callback is not None and c.callback.__name__ == "demo" for c in cli.app.registered_commands):
    register(cli.app)
    register_certify(cli.app)


def _invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(args))
    return result.exit_code, result.output


def test_verbs() -> None:
    import typer

    assert set(typer.main.get_command(cli.app).commands) == VERBS  # type: ignore[attr-defined]


def test_config_show(tmp_path: Path) -> None:
    code, shown = _invoke("config", "show", "--json", str(tmp_path / "c.json"), "worker.count=3")
    assert code == 0 and "command line" in shown
    assert json.loads((tmp_path / "c.json").read_text())["worker.count"] == {"value": 3, "source": "command line"}


def test_kernels(tmp_path: Path) -> None:
    code, shown = _invoke("kernels", "--json", str(tmp_path / "k.json"))
    assert code == 0 and "sliding" not in json.loads((tmp_path / "k.json").read_text())["cpu"]["features"]
    assert "local attention window" in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["serve", "sampling.temprature=1"], "sampling"),
        (["demo", "--sabotage", "luck"], "attention, temperature, weights, order"),
        (["submit", "--address", "http://127.0.0.1:1", "--env", "PATH"], "write KEY=VALUE"),
        (["compare", "missing.jsonl", "model.path=/does/not/exist"], "missing.jsonl"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(args: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "rollout", *args], capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2)
    assert said in done.stderr and "Traceback" not in done.stderr
