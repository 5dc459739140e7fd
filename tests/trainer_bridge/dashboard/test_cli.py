"""The verbs ``dashboard`` and ``runs``, and what the demo does with them."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rollout.errors import ConfigError, InvalidRequest
from tests.trainer_bridge.store.runs import record_run
from trainer_bridge.dashboard import cli
from trainer_bridge.dashboard.cli import demo_dashboard, open_browser, register, require_extra


def invoke(*words: str) -> Any:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})


def test_runs_lists_verdict_and_size_and_removes_old_ones(tmp_path: Path) -> None:
    record_run(tmp_path, "old", steps=1, broken_from=0, created=1.0)
    record_run(tmp_path, "new", steps=2, created=2.0)
    figures = tmp_path / "runs.json"
    shown = invoke("runs", "--runs", str(tmp_path), "--json", str(figures))
    assert (
        shown.exit_code == 0 and re.search(r"old\W+UNEQUAL", shown.output) and re.search(r"new\W+equal", shown.output)
    )
    rows = json.loads(figures.read_text())["runs"]
    assert [r["run"] for r in rows] == ["new", "old"] and all(r["bytes"] > 0 for r in rows)
    shown = invoke("runs", "--runs", str(tmp_path), "--keep", "1")
    assert "removed run of run old" in shown.output and "1 runs" in shown.output


def test_runs_answers_sql(tmp_path: Path) -> None:
    comparisons, _ = record_run(tmp_path, steps=2, broken_from=1)
    unequal = "SELECT step, count(*) AS n FROM tokens WHERE mask AND rollout_bits <> trainer_bits GROUP BY step"
    shown = invoke("runs", "--runs", str(tmp_path), "--sql", unequal)
    assert shown.exit_code == 0 and re.search(rf"1\W+{comparisons[1].unequal_tokens}\W", shown.output), shown.output
    shown = invoke("runs", "--runs", str(tmp_path), "--sql", "SELECT run, tokens FROM steps ORDER BY step")
    assert re.search(rf"run\W+{comparisons[0].tokens}\W", shown.output)
    assert isinstance(invoke("runs", "--runs", str(tmp_path), "--sql", "SELECT nothing").exception, InvalidRequest)


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    record_run(tmp_path, steps=1)
    words = [sys.executable, "-m", "rollout", "dashboard", "--runs", str(tmp_path), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        with urllib.request.urlopen(address[0] + "api/runs", timeout=60) as answer:
            assert json.load(answer)["root"] == str(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "duckdb" else found(name))
    with pytest.raises(ConfigError, match=r"this needs duckdb: pip install 'zerodrift\[dashboard\]'"):
        require_extra()


def test_the_demo_records_where_it_is_told(tmp_path: Path) -> None:
    with demo_dashboard(None, False) as folder:
        assert folder is None
    with demo_dashboard(tmp_path, False) as folder:
        assert folder == tmp_path


@pytest.mark.parametrize(("screen", "terminal"), [(True, True), (True, False), (False, True)])
def test_a_browser_opens_where_someone_can_see_it(
    monkeypatch: pytest.MonkeyPatch, screen: bool, terminal: bool
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(cli.webbrowser, "open", lambda address: not opened.append(address))
    monkeypatch.setattr(cli.sys, "platform", "linux")
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: terminal)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if screen:
        monkeypatch.setenv("DISPLAY", ":0")
    assert open_browser("http://here") is (screen and terminal) and bool(opened) is (screen and terminal)


def test_the_demo_keeps_the_page_up_until_ctrl_c(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from trainer_bridge.dashboard.cli import demo_dashboard\n"
        f"with demo_dashboard(Path({str(tmp_path)!r}), True) as folder:\n    print('running', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        address = re.search(r"http://\S+", lines[0])
        assert address is not None and lines[1] == "running\n" and "Ctrl-C" in lines[2]
        with urllib.request.urlopen(address[0] + "api/runs", timeout=60) as answer:
            assert json.load(answer)["runs"] == []
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
