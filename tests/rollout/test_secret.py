"""A secret has one comparison, in constant time, and shows nothing."""

from __future__ import annotations

import ast
import hmac
import re
from pathlib import Path

import pytest

from rollout.secret import Secret

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for folder in ("rollout", "trainer_bridge") for path in (ROOT / folder).rglob("*.py") if "v1" not in path.parts
]


def test_it_matches_its_token_only() -> None:
    secret = Secret.of("abc")
    assert secret.matches("abc")
    assert not any(secret.matches(other) for other in ("", "ab", "abcd", "ABC", "abd", "\udc80"))
    assert Secret(bytes.fromhex(secret.hex)).matches("abc")


def test_nothing_else_compares_or_shows_it() -> None:
    secret = Secret.of("abc")
    for compare in (lambda: secret == Secret.of("abc"), lambda: secret != "abc", lambda: secret in [Secret.of("abc")]):
        with pytest.raises(TypeError, match="constant time"):
            compare()
    with pytest.raises(TypeError, match="unhashable"):
        hash(secret)
    assert "abc" not in f"{secret!r}{secret}" and secret.hex not in f"{secret!r}{secret}"


def test_every_comparison_goes_through_compare_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is right or wrong about the token, as much is compared."""
    sizes: list[tuple[int, int]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: sizes.append((len(a), len(b))) or real(a, b))
    for token in ("abc", "abd", "x", "y" * 10_000, ""):
        Secret.of("abc").matches(token)
    assert sizes == [(32, 32)] * 5


def uses(tree: ast.Module, pattern: str) -> bool:
    """Whether a text constant or an attribute matches."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return any(re.fullmatch(pattern, text) for text in texts)


def test_whoever_reads_an_authorization_header_compares_with_a_secret() -> None:
    """The readers are known, and none of them compares by itself."""
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    readers = {name for name, tree in trees.items() if uses(tree, r"authorization")}
    assert readers == {"rollout/access.py", "trainer_bridge/dashboard/guard.py", "trainer_bridge/wire/channel.py"}
    for name in readers - {"trainer_bridge/wire/channel.py"}:  # that one sends
        assert "from rollout.secret import Secret" in (ROOT / name).read_text(encoding="utf-8")
    comparing = {name for name in trees if "hmac" in (ROOT / name).read_text(encoding="utf-8")}
    assert comparing == {"rollout/secret.py"}
