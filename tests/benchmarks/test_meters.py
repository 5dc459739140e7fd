"""Meters of memory and processor time, on a process that is told what to use."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.meters import UsageMeter, cpu_seconds, peak_bytes, process_tree, reset_peak

PROGRAM = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
for line in sys.stdin:
    if line.strip() == "memory":
        held = bytearray(200 * 2**20)
        del held
    if line.strip() == "work":
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    print("done", flush=True)
child.communicate(b"\\n")
"""


def test_a_tree_is_measured_as_a_whole() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None

        def tell(what: str) -> None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(what.encode() + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"done\n"

        tell("nothing")
        assert len(process_tree(process.pid)) == 2
        before = peak_bytes(process.pid)
        tell("memory")
        assert peak_bytes(process.pid) > before + 190 * 2**20
        reset_peak(process.pid)
        assert peak_bytes(process.pid) < before + 50 * 2**20
        used = cpu_seconds(process.pid)
        meter = UsageMeter(process.pid)
        tell("work")
        assert cpu_seconds(process.pid) - used >= 0.28
        assert meter.read().own > 0
        process.stdin.close()
    assert process_tree(process.pid) == []
    assert peak_bytes(process.pid) == 0
