"""Every dependency is permissive, or known and listed in docs/security.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.licences import EXTRAS, KNOWN, judged, licence_of, needed

SECURITY = Path(__file__).parents[1] / "docs/security.md"


def test_every_dependency() -> None:
    names = list(needed("zerodrift", EXTRAS))
    assert {"torch", "grpcio", "ray", "starlette", "hypothesis"} <= set(names)
    assert {name: licence_of(name) for name in names if judged(name, licence_of(name)) == "unknown"} == {}


def test_what_has_conditions_is_documented() -> None:
    text = SECURITY.read_text(encoding="utf-8")
    assert [name for name in KNOWN if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("licence", "verdict"),
    [
        ("MIT", "ok"), ("BSD-3-Clause AND MIT", "ok"), ("Apache Software License", "ok"), ("LGPL-2.1", "unknown"),
        ("GNU General Public License v3 (GPLv3)", "unknown"), ("MIT OR GPL-3.0", "unknown"), ("", "unknown"),
        ("Proprietary", "unknown"), ("MPL-2.0 AND MIT", "unknown"),
    ],
)  # fmt: skip
def test_what_counts(licence: str, verdict: str) -> None:
    assert judged("something", licence) == verdict
