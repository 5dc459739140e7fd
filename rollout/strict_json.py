"""JSON that others wrote, without what readers disagree on: a key twice, or nesting that no reader holds."""

from __future__ import annotations

import json
from typing import Any


def strict_loads(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: not JSON, an object with a key twice (Python would keep the last one), or nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} stands twice")
    return value
