"""The Chinese pages keep step with the English ones: same commands, same figures, same links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAIRS = (
    ("README.md", "README.zh.md"),
    ("docs/dashboard.md", "docs/zh/dashboard.md"),
    ("docs/deploy.md", "docs/zh/install.md"),
)
COMMANDS = r"^((?:zerodrift|make|kubectl|RAY_AUTH_MODE=token) .+?)(?:\s+#.*)?$"


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```\n(.*?)```", text(page), re.S)
    return [line for block in blocks for line in re.findall(COMMANDS, block, re.M)]


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[p[1] for p in PAIRS])
def test_commands_are_the_same_in_the_same_order(english: str, chinese: str) -> None:
    ours = [c for c in commands(chinese) if english == "README.md" or not c.startswith("make ")]
    assert ours == commands(english) and len(ours) >= 4


@pytest.mark.parametrize("page", ["npu", "verl"])
def test_blocks_of_code_are_the_english_pages(page: str) -> None:
    """All of them, comments aside; the English page may have more."""
    english, chinese = (fenced(f"docs/{folder}{page}.md") for folder in ("", "zh/"))
    everything = english + fenced("docs/dashboard.md")
    assert chinese and [block for block in chinese if block not in everything] == []
    assert english[0] == chinese[0]


def fenced(page: str) -> list[list[str]]:
    blocks = re.findall(r"```\w*\n(.*?)```", text(page), re.S)
    return [[re.sub(r"\s+#.*$", "", line) for line in block.splitlines()] for block in blocks]


def test_tables_of_the_npu_page_are_the_same() -> None:
    variables = [
        re.findall(r"^\| ([A-Z_]{6,}) \| (\S+) \|$", text(page), re.M) for page in ("docs/npu.md", "docs/zh/npu.md")
    ]
    assert variables[0] == variables[1] and len(variables[0]) >= 6
    plans = [
        set(re.findall(r"^\| (\w+) \| [^|]+ \| [^|]+ \|$", text(page), re.M))
        for page in ("docs/npu.md", "docs/zh/npu.md")
    ]
    assert {"plain", "tile_aligned", "row_by_row", "fused_infer"} <= plans[0] & plans[1]


def test_the_tables_of_what_runs_have_the_same_rows() -> None:
    """As many rows, with the same links and commands in each."""
    rows = [
        table_after(page, heading)
        for page, heading in (("README.md", "What runs where"), ("README.zh.md", "哪些已运行"))
    ]
    names = [
        [set(re.findall(r"veRL 0[\d.]+|`make [\w-]+`|top-n|KubeRay|Ray|FA3|MoE", row)) for row in table]
        for table in rows
    ]
    assert names[0] == names[1]


def table_after(page: str, heading: str) -> list[str]:
    return re.findall(r"^\| .*$", text(page).split(f"## {heading}")[1].split("\n## ")[0], re.M)


def test_figures_are_the_same() -> None:
    rows = [re.findall(r"^(\| \d \| v\d .*)$", text(page), re.M) for page in ("README.md", "README.zh.md")]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    totals = [
        re.search(r"([\d,]+) (?:of|/) \1\D{1,40}?(\d+) (?:s|秒)", text(page)) for page in ("README.md", "README.zh.md")
    ]
    assert totals[0] is not None and totals[1] is not None and totals[0].groups() == totals[1].groups()


def test_pictures_are_the_same() -> None:
    shown = [re.findall(r"\((docs/images/[\w.]+)\)", text(page)) for page in ("README.md", "README.zh.md")]
    assert shown[0] == shown[1] and len(shown[0]) == 3


def test_names_in_code_are_those_of_the_english_page() -> None:
    for english, chinese in PAIRS[1:]:
        quoted = set(re.findall(r"`([\w./\[\]\-'=:{} \"]+)`", text(chinese)))
        known = text(english) + text("docs/dashboard.md") + text("README.md") + "pip install torch==2.13.0"
        assert {q for q in quoted if q not in known} == set(), chinese


def test_each_language_links_to_the_other() -> None:
    assert "(README.zh.md)" in text("README.md") and "(README.md)" in text("README.zh.md")
