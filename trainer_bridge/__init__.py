"""The trainer's side of zerodrift: client, training forward, comparison."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Lazily, since the client alone needs no torch.
    if name == "align":
        from trainer_bridge.aligned import align

        return align
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
