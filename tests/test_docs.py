"""Documents name what exists: verbs, settings, links, modules."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from rollout import cli
from rollout.cli_certify import register as register_certify
from rollout.config import describe
from rollout.v1 import rollout_pb2
from trainer_bridge.cli import register

# Other test modules may have added some of them.
VERBS = {getattr(c.callback, "__name__", "") for c in cli.app.registered_commands}
if "demo" not in VERBS:
    register(cli.app)
if "certify" not in VERBS:
    register_certify(cli.app)
ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/zh").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_modules_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:rollout|trainer_bridge|benchmarks|proto|configs|tests)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


def test_readme_commands_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    verbs = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"^zerodrift ([\w-]+)", text, re.M)) <= set(verbs)
    for target in set(re.findall(r"^make ([\w-]+)", text, re.M)):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target
    settings = {leaf.key for leaf in describe()}
    for key in set(re.findall(r" ([a-z]+\.[a-z_]+)=", text)):
        assert key in settings, key


def test_options_exist() -> None:
    """Every command line shown is one that the parser takes; an unknown option raises."""
    command = typer.main.get_command(cli.app)
    blocks = [
        "\n".join(re.findall(r"```(?:bash|sh|console)?\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
        for page in PAGES
    ]
    shown = [re.findall(r"^zerodrift (.+?)(?:\s+#.*)?$", block, re.M) for block in blocks]
    assert len(shown[0]) >= 10
    for line in (line for lines in shown for line in lines):
        verb, *args = shlex.split(line)
        sub = command.commands[verb]  # type: ignore[attr-defined]
        sub.make_context(verb, args, resilient_parsing=True)


def test_readme_python_compiles() -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S):
        compile(block, "README.md", "exec")


def test_the_figures_of_the_readme_agree_with_each_other() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| v\d \| ([\d,]+) \| \*\*([\d,]+)\*\*", text, re.M)
    tokens = [int(r[1].replace(",", "")) for r in rows]
    assert tokens == [int(r[2].replace(",", "")) for r in rows]
    assert f"{sum(tokens):,} of {sum(tokens):,} tokens equal" in text


def test_every_call_is_served() -> None:
    names = {m.name for m in rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].methods}
    assert names == {"Generate", "Score", "UpdateWeights", "GetServerInfo", "Abort", "Pause", "Resume"}
