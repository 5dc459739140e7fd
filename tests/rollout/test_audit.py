"""Who changed what when, and who was turned away; without prompts and tokens unless they are asked for."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.audit import REFUSALS_A_MINUTE, AuditInterceptor, AuditLog
from rollout.config import ServerSettings
from rollout.errors import RolloutError, Unauthenticated
from rollout.types import SamplingParams
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from tests.rollout.test_access import Tokens
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.wire.channel import ClientSecurity

SAMPLING = SamplingParams(seed=1, max_tokens=4)
SECRET_TEXT = "the prompt nobody may read"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def session(tokens: Tokens, settings: ServerSettings) -> None:
    """A trainer that does everything, an actor that asks for too much, and a stranger."""
    async with serving(FakeBackend(), settings=settings) as server:
        where = address(server)
        async with tokens.client(where, "trainer") as trainer:
            await trainer.generate(SECRET_TEXT, SAMPLING, request_id="g1", n=2)
            await trainer.update_weights([("a", np.zeros(2, np.float32))], version=7, digest="abcd")
            with pytest.raises(RolloutError):
                await trainer.update_weights([], version=8, digest="ef")
            await trainer.pause()
            await trainer.resume()
            await trainer.abort(all_requests=True)
        for name in ("actor", "nobody"):
            async with tokens.client(where, name) as client:
                with pytest.raises(RolloutError):
                    await client.pause()


async def test_control_and_refusals_are_written_down(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens", trainer="control", actor="generate")
    path = tmp_path / "audit.jsonl"
    await session(tokens, ServerSettings(tokens=str(tokens.path), audit_log=str(path)))
    told = [(r["event"], r["method"], r["caller"], r["code"]) for r in lines(path)]
    anyone = "ipv4:127.0.0.1"
    assert told == [
        ("control", "UpdateWeights", "trainer", "OK"),
        ("control", "UpdateWeights", "trainer", "INVALID_ARGUMENT"),
        ("control", "Pause", "trainer", "OK"),
        ("control", "Resume", "trainer", "OK"),
        ("control", "Abort", "trainer", "OK"),
        ("refused", "Pause", anyone, "PERMISSION_DENIED"),
        ("refused", "Pause", anyone, "UNAUTHENTICATED"),
    ]
    update = lines(path)[0]
    assert (update["version"], update["digest"], update["tensors"], update["policy"]) == (7, "abcd", 1, "wait")
    assert all(record["time"].startswith("20") and record["peer"].startswith("ipv4:") for record in lines(path))
    assert "actor" in lines(path)[5]["reason"]
    text = path.read_text()
    assert SECRET_TEXT not in text and not any(token in text for token in tokens.of.values())
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("prompts", [False, True])
async def test_requests_and_prompts_on_request_only(
    tmp_path: Path, prompts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens(tmp_path / "tokens", trainer="control", actor="generate")
    settings = ServerSettings(tokens=str(tokens.path), log_requests=True, log_prompts=prompts)
    with caplog.at_level(logging.INFO, "rollout.audit"):
        await session(tokens, settings)
    requests = [r.args for r in caplog.records if r.msg.startswith("request")]
    (generate,) = [record for record in map(json.loads, (a[0] for a in requests)) if record["method"] == "Generate"]  # type: ignore[index]
    assert (generate["request_id"], generate["n"], generate["prompt_tokens"]) == ("g1", 2, len(SECRET_TEXT))
    assert (generate["tokens"], generate["code"], generate["caller"]) == (8, "OK", "trainer")
    assert (SECRET_TEXT in caplog.text) == prompts
    assert not any(token in caplog.text for token in tokens.of.values())


async def test_by_default_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rollout.audit"):
        async with serving(FakeBackend()) as server, AsyncRolloutClient(address(server)) as client:
            await client.generate([3], SAMPLING)
            assert caplog.records == []
            await client.pause()
    assert "audit" in caplog.text and "Pause" in caplog.text, "control calls are, without a file as well"


def test_a_full_disk_loses_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    AuditLog(str(tmp_path / "absent" / "audit")).write({"event": "control", "version": 7})
    assert "cannot be written" in caplog.text and '"version": 7' in caplog.text


def test_the_file_may_be_rotated(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    log = AuditLog(str(path))
    log.write({"a": 1})
    os.rename(path, tmp_path / "audit.1")
    log.write({"a": "line\nbreak"})
    assert (lines(tmp_path / "audit.1"), lines(path)) == ([{"a": 1}], [{"a": "line\nbreak"}])


async def test_knocking_does_not_fill_the_disk(tmp_path: Path) -> None:
    path, now = tmp_path / "audit", [0.0]
    interceptor = AuditInterceptor(ServerSettings(audit_log=str(path)), clock=lambda: now[0])

    class Details:
        method = "/rollout.v1.RolloutService/Pause"

    class Context:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:5"

        def invocation_metadata(self) -> None:
            return None

    async def knock() -> None:
        with pytest.raises(Unauthenticated):
            async with interceptor.guard(Details(), Context()):  # type: ignore[arg-type]
                raise Unauthenticated("no")

    for _ in range(REFUSALS_A_MINUTE + 40):
        await knock()
    assert len(lines(path)) == REFUSALS_A_MINUTE
    now[0] = 61.0
    await knock()
    assert len(lines(path)) == REFUSALS_A_MINUTE + 1 and lines(path)[-1]["refusals_not_written"] == 40


async def test_a_wrong_token_over_tls_less_loopback_is_no_secret_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens(tmp_path / "tokens", trainer="control")
    wrong = tokens.of["trainer"][:-1] + "_"
    with caplog.at_level(logging.DEBUG):
        async with serving(FakeBackend(), settings=tokens.settings) as server:  # noqa: SIM117
            async with AsyncRolloutClient(address(server), security=ClientSecurity(token=wrong)) as client:
                with pytest.raises(Unauthenticated):
                    await client.pause()
    assert "UNAUTHENTICATED" in caplog.text and wrong not in caplog.text
