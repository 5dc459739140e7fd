"""Freed memory stays with the process inside, and goes back after it."""

from __future__ import annotations

import ctypes
import logging
import resource
import subprocess
import sys

import pytest

from rollout.heap import kept_memory

SCRIPT = """
import resource, sys
from rollout.heap import kept_memory

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        held = [b"x" * size for size in range(1 << 20, (1 << 20) + 16)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with kept_memory(int(sys.argv[1])):
    faults(2)
    print(faults(10))
"""
PAGES = 10 * 16 * (1 << 20) // resource.getpagesize()


def pages_asked_for(kept: int) -> int:
    """Page faults of ten times 16 MiB, after two to warm up, in a process of its own."""
    return int(
        subprocess.run([sys.executable, "-c", SCRIPT, str(kept)], capture_output=True, check=True, text=True).stdout
    )


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc here")
def test_what_was_freed_is_used_again() -> None:
    assert pages_asked_for(1 << 26) < PAGES // 100
    assert pages_asked_for(1 << 16) > PAGES // 2, "control: with less, all of it goes back"


def test_without_glibc_it_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with caplog.at_level(logging.WARNING), kept_memory(1 << 26):
        pass
    assert "no mallopt" in caplog.text
