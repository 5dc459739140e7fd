"""The documents' figures are those of the results that are kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.publish import DOCUMENTS, NOTHING, STORE, Store, charts, rendered, way_to_charts
from tests.benchmarks.fakes import pair, results

PAGE = "Words.\n<!-- bench:readme -->\nold\n<!-- /bench -->\nMore.\n"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_document_is_current(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert "<!-- bench:" in text
    assert rendered(text, Store(STORE), way_to_charts(document)) == text, "make bench-publish"


def test_charts_are_current() -> None:
    drawn = charts(Store(STORE))
    kept = {path.name: path.read_text(encoding="utf-8") for path in STORE.glob("*.svg")}
    assert kept == drawn, "make bench-publish"


def test_results_name_no_place_on_the_machine() -> None:
    for path in STORE.glob("*.json"):
        assert re.findall(r'"/(?:root|home|work|tmp)[^"]*"', path.read_text(encoding="utf-8")) == []


def test_rendering_replaces_the_block_alone(tmp_path: Path) -> None:
    assert rendered(PAGE, Store(tmp_path), "x") == PAGE.replace("old", NOTHING)
    results(
        pair("vllm", "n32", [130.0, 120.0, 125.0], [100.0, 100.0, 100.0]),
        pair("inexact", "n32", [97.0], [100.0]),
        pair("service", "n32", [100.0], [96.0]),
        pair("floor", "n32", [84.0], [100.0]),
    ).save(tmp_path / "110m.json")
    page = rendered(PAGE, Store(tmp_path), "there")
    assert page.startswith("Words.\n<!-- bench:readme -->\n![") and page.endswith("<!-- /bench -->\nMore.\n")
    assert "](there/engines.svg)" in page
    assert "1.25x (1.20-1.30)" in page
    assert "exactness costs 3.0 %" in page and "keeps 96 %" in page and "84 % of the floor" in page
    assert "A processor, 2 cores (AVX512), 24 GiB, 2 threads each; 2026-01-02; commit abc1234" in page
    # Once more changes nothing.
    assert rendered(page, Store(tmp_path), "there") == page


def test_an_unknown_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="nonsense"):
        rendered(PAGE.replace("bench:readme", "bench:nonsense"), Store(tmp_path), "x")
