"""Where, when and on which code something was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).parents[1]
_PACKAGES = ("torch", "transformers", "numpy", "numba", "ray", "grpcio")


def processor() -> str:
    """The processor's name as the kernel has it."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def commit() -> str:
    """Short hash of the checkout, with "+" when tracked files differ from it; "" outside of git."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def session(threads: int) -> dict[str, Any]:
    """The record that stands beside every figure of a run."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "threads": threads,
        "load_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "commit": commit(),
    }
