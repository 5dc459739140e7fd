"""Runners: processes that answer, fail, and end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.drivers.channel import Job, checked
from benchmarks.meters import process_tree
from benchmarks.runner import Runner, RunnerFailed
from benchmarks.workloads import Workload
from tests.benchmarks.fakes import fake_spec

JOB = Workload("x", 2, prompt_tokens=4, new_tokens=3, samples=2).job(100, 1)


@contextmanager
def running(tmp_path: Path, **config: Any) -> Iterator[Runner]:
    runner = Runner(fake_spec(**config), {"told": "this"}, tmp_path / "log")
    try:
        yield runner
    finally:
        runner.close()


def test_answers_are_measured_and_the_process_ends(tmp_path: Path) -> None:
    with running(tmp_path) as runner:
        runner.wait_ready()
        first, second = runner.run(JOB), runner.run(JOB)
        assert first.tokens == second.tokens == 12
        assert first.mean_logprob == -1.0
        assert first.seconds > 0 and first.peak_bytes > 2**20
        pid = runner.facts["pid"]
        assert runner.facts["told"] == "this"
        assert len(process_tree(pid)) == 1
    assert not psutil.pid_exists(pid)
    assert "noise" in (tmp_path / "log").read_text()


def test_the_reason_of_a_failed_start_is_told(tmp_path: Path) -> None:
    with running(tmp_path, refuse="no such thing") as runner, pytest.raises(RunnerFailed, match="no such thing"):
        runner.wait_ready()


def test_a_death_is_told_with_its_exit_code(tmp_path: Path) -> None:
    with running(tmp_path, exit_at=2) as runner:
        runner.wait_ready()
        runner.run(JOB)
        with pytest.raises(RunnerFailed, match="exit code 3; last words: noise"):
            runner.run(JOB)
        with pytest.raises(RunnerFailed):
            runner.run(JOB)


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"short": 1}, "2 ids and 2 log-probs, not 3"), ({"logprob": float("nan")}, "not finite")],
)
def test_incomplete_work_is_no_measurement(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    with running(tmp_path, **config) as runner:
        runner.wait_ready()
        with pytest.raises(RunnerFailed, match=reason):
            runner.run(JOB)


def test_missing_samples_are_seen() -> None:
    job = Job([[1], [2]], 1, 1, 0)
    assert checked(job, [([5], [-2.0]), ([5], [-1.0])]) == -1.5
    with pytest.raises(RuntimeError, match="1 samples came back, 2 were asked for"):
        checked(job, [([5], [-2.0])])


def wait_until_stopped(pid: int) -> None:
    """A signal is delivered when the kernel likes; pytest's own limit ends the wait for one that never comes."""
    assert os.waitid(os.P_PID, pid, os.WSTOPPED) is not None


def test_one_that_polls_is_stopped_between_its_turns(tmp_path: Path) -> None:
    runner = Runner(dataclasses.replace(fake_spec(), sleeps=False), {}, tmp_path / "log")
    try:
        runner.wait_ready()
        process = psutil.Process(runner.facts["pid"])
        wait_until_stopped(process.pid)
        assert runner.run(JOB).tokens == 12
        wait_until_stopped(process.pid)
    finally:
        runner.close()
    assert not process.is_running()
