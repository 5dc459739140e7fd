"""What a tree of processes used: processor time, peak memory; and what the rest of the machine used meanwhile."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


def process_tree(pid: int) -> list[psutil.Process]:
    """The process and everything below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def cpu_seconds(pid: int) -> float:
    """Processor time of the tree so far."""
    total = 0.0
    for process in process_tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def busy_seconds() -> float:
    """Processor time that the whole machine has spent on anything, stolen time included."""
    t = psutil.cpu_times()
    return float(t.user + t.nice + t.system + t.irq + t.softirq + t.steal)


def peak_bytes(pid: int) -> int:
    """Sum of the peak resident sizes (VmHWM) over the tree."""
    return sum(_high_water(process.pid) for process in process_tree(pid))


def reset_peak(pid: int) -> None:
    """Let the peaks of the tree start anew at the present sizes."""
    for process in process_tree(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def _high_water(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor use of a span of time."""

    own: float
    """cores that the tree kept busy"""
    others: float
    """cores that everything else kept busy"""


class UsageMeter:
    """Between its making and ``read``."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._own, self._all, self._start = cpu_seconds(pid), busy_seconds(), time.perf_counter()

    def read(self) -> Usage:
        """Use since the meter was made."""
        own = cpu_seconds(self._pid) - self._own
        others = busy_seconds() - self._all - own
        # The meter's own span, not the engine's time: on a busy machine they differ a lot at short work.
        seconds = time.perf_counter() - self._start
        return Usage(round(own / seconds, 3), round(max(others, 0.0) / seconds, 3))
