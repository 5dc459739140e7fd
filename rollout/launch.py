"""Run zerodrift as a Ray job: submit, stream the log, return the job's end as an exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from rollout.config import is_loopback
from rollout.errors import ConfigError, NotFound, ReplicaUnavailable

logger = logging.getLogger(__name__)

EXIT_CODES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 2}
NO_AGENT = "No available agent"
RETRY_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Waits between tries while a fresh head has no agent yet."""
STOP_WAIT_S = 30.0
"""How long a stopped job may take to end."""


class JobClient(Protocol):
    """What is used of ``ray.job_submission.JobSubmissionClient``."""

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]) -> str:
        """Start a job; RuntimeError when the head refuses."""
        ...

    def stop_job(self, job_id: str) -> bool:
        """Ask a job to end; whether it was running."""
        ...

    def get_job_status(self, job_id: str) -> Any:
        """A ``JobStatus``: a string such as RUNNING."""
        ...

    def get_job_info(self, job_id: str) -> Any:
        """A ``JobDetails``: status and message."""
        ...

    def get_job_logs(self, job_id: str) -> str:
        """Everything the job has printed."""
        ...

    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """What the job has printed and prints, until it ends."""
        ...


def submit(
    config_path: Path | None,
    address: str,
    *,
    entrypoint_args: Sequence[str] = ("demo",),
    replicas: int | None = None,
    env: Mapping[str, str] | None = None,
    working_dir: Path | None = None,
    token: str | None = None,
    python: str | None = None,
    ca: Path | None = None,
    client: JobClient | None = None,
    write: Callable[[str], object] = sys.stdout.write,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run ``python -m rollout ENTRYPOINT_ARGS --config FILE [worker.count=REPLICAS]`` as a job of a running Ray head.

    Args:
        config_path: Settings file; it travels to the cluster with the job.
        address: Address of the head's dashboard, such as ``http://127.0.0.1:8265``.
        entrypoint_args: Verb of the command line and its options.
        replicas: Overrides ``worker.count``.
        env: Environment variables of the job.
        working_dir: Folder to upload, when zerodrift itself is not installed on the cluster; it must then hold the
            settings file. None: only the settings file is uploaded.
        token: Ray's auth token. None: as Ray finds it (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token).
        ca: PEM file of the authority that signed the head's https certificate; None: the system's authorities.
        python: Interpreter on the cluster. None: this one for a head on this machine, else ``python``.
        client: Job client to use in place of a connection to ``address``.
        write: Receives the job's log.
        sleep: Waits between tries.

    Returns:
        0 when the job succeeded, 1 when it failed, 2 when it was stopped. Ctrl-C, or SIGTERM, stops the job.

    Raises:
        ConfigError: no settings file where one is named, or a token that the head does not take.
        ReplicaUnavailable: no head at the address, or it went away.
    """
    with _packed(config_path, working_dir) as (folder, config_name):
        command = [python or _interpreter(address), "-m", "rollout", *entrypoint_args]
        command += ["--config", config_name] if config_name else []
        command += [f"worker.count={replicas}"] if replicas is not None else []
        runtime_env: dict[str, Any] = {"env_vars": dict(env)} if env else {}
        if folder is not None:
            runtime_env["working_dir"] = str(folder)
        connected = client or connect(address, token, ca)
        # Our own id: a try whose answer was lost cannot start a second job.
        job_id = f"zerodrift-{secrets.token_hex(6)}"
        try:
            with _terminated_as_interrupted():
                _start(connected, job_id, shlex.join(command), runtime_env, sleep)
                logger.info("job %s runs at %s", job_id, address)
                status = asyncio.run(_follow(connected, job_id, write, sleep))
        except KeyboardInterrupt:
            status = _stop(connected, job_id, sleep)
    if status == "FAILED":
        logger.error("job %s failed: %s", job_id, connected.get_job_info(job_id).message)
    return EXIT_CODES[status]


def connect(address: str, token: str | None = None, ca: Path | None = None) -> JobClient:
    """A client of the head at ``address``, with the token in its headers."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    found = find_token(address, token)
    headers = {"Authorization": f"Bearer {found}"} if found else None
    if ca is not None and not ca.is_file():
        raise ConfigError(f"--ca {ca} is no file; give the PEM file of the head's authority", field="ca")
    if found and not address.startswith("https:") and not _is_local(address):
        logger.warning("the Ray token travels to %s without TLS: anyone on the way can read it", address)
    try:
        with _own_address():
            return JobSubmissionClient(address, headers=headers, verify=True if ca is None else str(ca))
    except AuthenticationError as error:
        raise ConfigError(
            f"the Ray head at {address} refused the token ({str(error).splitlines()[0]}); "
            "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token (`ray get-auth-token` on the head)"
        ) from error
    except (ConnectionError, RuntimeError) as error:
        raise ReplicaUnavailable(
            f"no Ray dashboard answers at {address} ({error}); start one with `ray start --head`, "
            "or give the address it prints"
        ) from error


def find_token(address: str, token: str | None = None) -> str | None:
    """The token to send: given, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, then ~/.ray/auth_token for a local head.

    Ray's own client looks only when RAY_AUTH_MODE is ``token`` here, though a head that found a token demands it
    whatever the mode is here. With RAY_AUTH_MODE=disabled nothing is looked up.
    """
    if token is not None:
        return token
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if text := os.environ.get("RAY_AUTH_TOKEN"):
        return text
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if not named and not (_is_local(address) and path.is_file()):
        return None
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError as error:
        raise ConfigError(f"RAY_AUTH_TOKEN_PATH={path} cannot be read ({error.strerror})") from error


def _is_local(address: str) -> bool:
    host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
    return address == "auto" or is_loopback(host)


def _interpreter(address: str) -> str:
    # The cluster's PATH need not have this virtual environment, but a local head can run its interpreter.
    return sys.executable if _is_local(address) else "python"


@contextmanager
def _own_address() -> Iterator[None]:
    """Hide the variables that Ray prefers to an explicit address."""
    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A CI run that ends us by SIGTERM must not leave its job behind. Elsewhere than on the main thread: nothing."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _packed(config_path: Path | None, working_dir: Path | None) -> Iterator[tuple[Path | None, str | None]]:
    """The folder to upload and the settings file's name in it."""
    if config_path is not None and not config_path.is_file():
        raise NotFound(f"settings file {config_path} does not exist", field="config")
    if working_dir is not None:
        yield working_dir, _name_within(config_path, working_dir)
    elif config_path is None:
        yield None, None
    else:
        with tempfile.TemporaryDirectory(prefix="zerodrift-job-") as folder:
            shutil.copyfile(config_path, Path(folder) / config_path.name)
            yield Path(folder), config_path.name


def _name_within(config_path: Path | None, working_dir: Path) -> str | None:
    if not working_dir.is_dir():
        raise ConfigError(f"working_dir {working_dir} is not a folder", field="working_dir")
    if config_path is None:
        return None
    try:
        return str(config_path.resolve().relative_to(working_dir.resolve()))
    except ValueError as error:
        raise ConfigError(
            f"settings file {config_path} is not in working_dir {working_dir}, so it would not travel with the job; "
            "copy it there",
            field="config",
        ) from error


def _start(
    client: JobClient, job_id: str, entrypoint: str, runtime_env: dict[str, Any], sleep: Callable[[float], None]
) -> None:
    for wait in (*RETRY_WAITS_S, None):
        try:
            client.submit_job(entrypoint=entrypoint, submission_id=job_id, runtime_env=runtime_env)
        except RuntimeError as error:
            if NO_AGENT not in str(error) or wait is None:
                raise ReplicaUnavailable(f"the Ray head did not take the job: {error}") from error
            logger.info("the Ray head has no agent yet; next try in %s s", wait)
            sleep(wait)
        else:
            return


async def _follow(
    client: JobClient, job_id: str, write: Callable[[str], object], sleep: Callable[[float], None]
) -> str:
    """Write the log as it grows; the job's end state. A broken connection is taken up where it broke."""
    from aiohttp import ClientError

    written = 0
    while True:
        received = 0
        try:
            async for text in client.tail_job_logs(job_id):
                received += len(text)
                # A new connection starts over at the first line.
                if received > written:
                    write(text[written - received :])
                    written = received
        except (ClientError, RuntimeError, OSError) as error:
            logger.warning("the log of job %s broke off (%s); looking again", job_id, error)
        status = _status(client, job_id)
        if status in EXIT_CODES:
            if rest := client.get_job_logs(job_id)[written:]:
                write(rest)
            return status
        sleep(1.0)


def _status(client: JobClient, job_id: str) -> str:
    try:
        return str(client.get_job_status(job_id))
    except (RuntimeError, OSError) as error:
        raise ReplicaUnavailable(
            f"the Ray head stopped answering ({error}); job {job_id} may still run: `ray job status {job_id}`"
        ) from error


def _stop(client: JobClient, job_id: str, sleep: Callable[[float], None]) -> str:
    logger.warning("stopping job %s", job_id)
    try:
        client.stop_job(job_id)
    except RuntimeError as error:
        raise ReplicaUnavailable(f"job {job_id} could not be stopped ({error}); `ray job stop {job_id}`") from error
    waited = 0.0
    while (status := _status(client, job_id)) not in EXIT_CODES:
        if waited >= STOP_WAIT_S:
            raise ReplicaUnavailable(f"job {job_id} is still {status} after {waited:.0f} s; `ray job status {job_id}`")
        sleep(0.5)
        waited += 0.5
    return status
