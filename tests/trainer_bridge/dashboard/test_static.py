"""The page's files: two languages with the same strings, nothing from elsewhere, small modules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trainer_bridge.dashboard.app import STATIC

OWN = sorted([*STATIC.glob("*.js"), *STATIC.glob("views/*.js"), STATIC / "index.html", STATIC / "style.css"])
STRINGS = {name: json.loads((STATIC / f"strings/{name}.json").read_text(encoding="utf-8")) for name in ("en", "zh")}


def used_keys() -> set[str]:
    text = "".join(path.read_text(encoding="utf-8") for path in OWN)
    keys = set(re.findall(r"\bt\(\"(\w+)\"", text)) | set(re.findall(r"data-i18n=\"(\w+)\"", text))
    return keys


def test_both_languages_have_the_same_keys_and_places() -> None:
    assert list(STRINGS["en"]) == list(STRINGS["zh"])
    for key, english in STRINGS["en"].items():
        places = [set(re.findall(r"\{(\w+)\}", text)) for text in (english, STRINGS["zh"][key])]
        assert places[0] == places[1], key
        assert english and STRINGS["zh"][key], key


def test_every_key_that_is_used_exists() -> None:
    keys = used_keys()
    assert len(keys) > 100
    assert keys <= STRINGS["en"].keys(), keys - STRINGS["en"].keys()


def test_no_string_is_left_over() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in OWN)
    built = re.compile(r"^(view|by|group)_")
    assert [k for k in STRINGS["en"] if not built.match(k) and f'"{k}"' not in text] == []


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.name)
def test_nothing_is_fetched_from_elsewhere_and_files_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?:https?:)?//(?!www\.w3\.org)[a-z0-9.-]+\.[a-z]{2,}/", text)
    assert text.count("\n") < 400
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", text)
