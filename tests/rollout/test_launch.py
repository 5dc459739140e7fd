"""The launcher against a fake job client: what is submitted, what is streamed, which exit code comes back."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout import launch
from rollout.errors import ConfigError, NotFound, ReplicaUnavailable
from rollout.launch import find_token, submit

CTRL_C = "\x03"
"""In a fake log: the user presses Ctrl-C while the job prints nothing more."""
TERMINATE = "\x0f"
"""In a fake log: the process gets SIGTERM, as from a CI run that is cancelled."""
ADDRESS = "http://127.0.0.1:8265"


class FakeClient:
    """A Ray head with one job. ``tails`` are the log connections in order; an exception in one breaks it there."""

    def __init__(
        self,
        *tails: list[str | BaseException],
        status: list[str | Exception] | None = None,
        refusals: list[str] | None = None,
        log: str | None = None,
    ) -> None:
        self.tails = list(tails) or [["done\n"]]
        self.statuses: list[str | Exception] = list(status or ["SUCCEEDED"])
        self.refusals = list(refusals or [])
        self.log = log
        self.submitted: list[dict[str, Any]] = []
        self.uploaded: dict[str, str] = {}
        self.stopped: list[str] = []
        self.sent = ""

    def submit_job(self, **job: Any) -> str:
        self.submitted.append(job)
        if self.refusals:
            raise RuntimeError(self.refusals.pop(0))
        folder = job["runtime_env"].get("working_dir")
        if folder:
            self.uploaded = {path.name: path.read_text() for path in Path(folder).iterdir()}
        return str(job["submission_id"])

    def stop_job(self, job_id: str) -> bool:
        self.stopped.append(job_id)
        return True

    def get_job_status(self, job_id: str) -> str:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(status, Exception):
            raise status
        return status

    def get_job_info(self, job_id: str) -> SimpleNamespace:
        return SimpleNamespace(status=self.statuses[0], message="the driver exited with 1")

    def get_job_logs(self, job_id: str) -> str:
        return self.sent if self.log is None else self.log

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        self.sent = ""
        for part in self.tails.pop(0):
            if isinstance(part, BaseException):
                raise part
            if part in (CTRL_C, TERMINATE):
                signal.raise_signal(signal.SIGINT if part == CTRL_C else signal.SIGTERM)
                await asyncio.Event().wait()
            self.sent += part
            yield part


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "demo.yaml"
    path.parent.mkdir()
    path.write_text("worker: {count: 2}\n")
    (path.parent / "secret.txt").write_text("not for the cluster")
    return path


class Run:
    """What one call of ``submit`` did."""

    def __init__(self, client: FakeClient, config: Path | None, address: str = ADDRESS, **options: Any) -> None:
        self.written: list[str] = []
        self.waits: list[float] = []
        self.code = submit(
            config, address, client=client, write=self.written.append, sleep=self.waits.append, **options
        )

    @property
    def text(self) -> str:
        return "".join(self.written)


def test_only_the_settings_file_travels(config: Path) -> None:
    client = FakeClient()
    assert Run(client, config).code == 0
    (job,) = client.submitted
    assert job["entrypoint"] == f"{sys.executable} -m rollout demo --config demo.yaml"
    assert client.uploaded == {"demo.yaml": "worker: {count: 2}\n"}
    assert not Path(job["runtime_env"]["working_dir"]).exists()
    assert "env_vars" not in job["runtime_env"]


def test_arguments_replicas_and_environment_reach_the_job(config: Path) -> None:
    client = FakeClient()
    args = ["demo", "--json", "a result.json"]
    Run(client, config, entrypoint_args=args, replicas=1, env={"A": "b"}, python="/opt/py")
    (job,) = client.submitted
    assert job["entrypoint"] == "/opt/py -m rollout demo --json 'a result.json' --config demo.yaml worker.count=1"
    assert job["runtime_env"]["env_vars"] == {"A": "b"}


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("http://127.0.0.1:8265", True),
        ("127.0.0.1:8265", True),
        ("http://localhost:8265", True),
        ("http://[::1]:8265", True),
        ("auto", True),
        ("http://head:8265", False),
        ("head:8265", False),
        ("http://10.0.0.1:8265", False),
    ],
)
def test_this_interpreter_is_used_on_this_machine_only(config: Path, address: str, local: bool) -> None:
    client = FakeClient()
    Run(client, config, address)
    assert client.submitted[0]["entrypoint"].split()[0] == (sys.executable if local else "python")


def test_without_settings_nothing_is_uploaded() -> None:
    client = FakeClient()
    Run(client, None)
    assert client.submitted[0]["entrypoint"] == f"{sys.executable} -m rollout demo"
    assert client.submitted[0]["runtime_env"] == {}


def test_a_working_dir_is_uploaded_with_the_settings_named_from_it(config: Path) -> None:
    client = FakeClient()
    Run(client, config, working_dir=config.parent)
    assert client.submitted[0]["runtime_env"]["working_dir"] == str(config.parent)
    assert client.submitted[0]["entrypoint"].endswith("--config demo.yaml")
    assert "secret.txt" in client.uploaded


def test_settings_that_would_not_travel_are_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    client = FakeClient()
    with pytest.raises(ConfigError, match="would not travel"):
        Run(client, config, working_dir=tmp_path / "other")
    with pytest.raises(ConfigError, match="is not a folder"):
        Run(client, config, working_dir=tmp_path / "none")
    with pytest.raises(NotFound, match=r"none\.yaml does not exist"):
        Run(client, tmp_path / "none.yaml")
    assert client.submitted == []


@pytest.mark.parametrize(("status", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("STOPPED", 2)])
def test_exit_code(config: Path, status: str, code: int) -> None:
    assert Run(FakeClient(status=[status]), config).code == code


def test_why_a_job_failed_is_logged(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(FakeClient(status=["FAILED"]), config)
    assert "the driver exited with 1" in caplog.text


def test_a_head_without_agent_is_tried_again_with_one_id(config: Path) -> None:
    client = FakeClient(refusals=["No available agent to submit job", "500: No available agent"])
    run = Run(client, config)
    assert run.code == 0
    assert run.waits == list(launch.RETRY_WAITS_S[:2])
    assert len(client.submitted) == 3
    assert len({job["submission_id"] for job in client.submitted}) == 1


def test_tries_end(config: Path) -> None:
    client = FakeClient(refusals=["No available agent"] * 100)
    with pytest.raises(ReplicaUnavailable, match="did not take the job"):
        Run(client, config)
    assert len(client.submitted) == len(launch.RETRY_WAITS_S) + 1


def test_other_refusals_are_final(config: Path) -> None:
    client = FakeClient(refusals=["disk full"])
    with pytest.raises(ReplicaUnavailable, match="disk full"):
        Run(client, config)
    assert len(client.submitted) == 1


def test_the_log_is_written_as_it_comes(config: Path) -> None:
    assert Run(FakeClient(["step 1\n", "step 2\n"]), config).written == ["step 1\n", "step 2\n"]


@pytest.mark.parametrize("fault", [RuntimeError("closed"), ConnectionResetError("reset"), None])
def test_a_broken_log_goes_on_where_it_broke(config: Path, fault: BaseException | None) -> None:
    first: list[str | BaseException] = ["step 1\nst", *([fault] if fault else [])]
    client = FakeClient(first, ["step", " 1\nstep 2\n", "end\n"], status=["RUNNING", "SUCCEEDED"])
    assert Run(client, config).text == "step 1\nstep 2\nend\n"


def test_what_the_broken_log_left_out_is_written_at_the_end(config: Path) -> None:
    client = FakeClient(["step 1\n", RuntimeError("closed")], log="step 1\nstep 2\n")
    assert Run(client, config).text == "step 1\nstep 2\n"


def test_a_head_that_goes_away_is_an_error_that_names_the_job(config: Path) -> None:
    with pytest.raises(ReplicaUnavailable, match=r"gone.*ray job status zerodrift-"):
        Run(FakeClient(["step 1\n"], status=[RuntimeError("gone")]), config)


@pytest.mark.parametrize("end", [CTRL_C, TERMINATE], ids=["SIGINT", "SIGTERM"])
def test_ctrl_c_stops_the_job_and_waits_for_its_end(config: Path, end: str) -> None:
    client = FakeClient(["step 1\n", end], status=["RUNNING", "RUNNING", "STOPPED"])
    before = signal.getsignal(signal.SIGTERM)
    run = Run(client, config)
    assert run.code == 2 and signal.getsignal(signal.SIGTERM) is before
    assert client.stopped == [client.submitted[0]["submission_id"]]
    assert run.waits == [0.5, 0.5]


def test_a_job_that_does_not_stop_is_an_error(config: Path) -> None:
    with pytest.raises(ReplicaUnavailable, match="still RUNNING after 30 s"):
        Run(FakeClient([CTRL_C], status=["RUNNING"]), config)


class TestToken:
    """Where the token comes from."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / ".ray").mkdir()
        return tmp_path

    def test_none(self) -> None:
        assert find_token(ADDRESS) is None

    def test_each_place_beats_the_next(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (home / ".ray" / "auth_token").write_text("of home\n")
        assert find_token(ADDRESS) == "of home"
        (home / "named").write_text("of file\n")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "named"))
        assert find_token(ADDRESS) == "of file"
        monkeypatch.setenv("RAY_AUTH_TOKEN", "of variable")
        assert find_token(ADDRESS) == "of variable"
        assert find_token(ADDRESS, "given") == "given"

    def test_the_home_token_stays_on_this_machine(self, home: Path) -> None:
        (home / ".ray" / "auth_token").write_text("of home\n")
        assert find_token("http://head:8265") is None

    def test_disabled_mode_looks_nothing_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "of variable")
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        assert find_token(ADDRESS) is None
        assert find_token(ADDRESS, "given") == "given"

    def test_a_named_file_that_is_missing_is_refused(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "none"))
        with pytest.raises(ConfigError, match=r"RAY_AUTH_TOKEN_PATH=.*none cannot be read"):
            find_token(ADDRESS)
