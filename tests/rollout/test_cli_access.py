"""``zerodrift token`` and ``zerodrift health``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout import cli
from rollout.access import TokenFile
from rollout.call_scope import Caller, Role
from rollout.errors import InvalidRequest
from tests.certificates import Authority
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from tests.rollout.test_cli import VERBS
from tests.rollout.test_tls import settings


def invoke(*args: str) -> tuple[int, str]:
    assert {"token", "health"} <= VERBS
    result = CliRunner().invoke(cli.app, list(args))
    return result.exit_code, result.stdout


def test_a_token_and_its_line(tmp_path: Path) -> None:
    out, tokens = tmp_path / "trainer.token", tmp_path / "tokens"
    code, line = invoke("token", "trainer", "--role", "control", "--out", str(out))
    assert code == 0 and out.stat().st_mode & 0o077 == 0
    tokens.write_text(line)
    assert TokenFile(tokens).caller_of(out.read_text().strip()) == Caller("trainer", Role.CONTROL)
    assert out.read_text().strip() not in line
    assert isinstance(CliRunner().invoke(cli.app, ["token", "x", "--role", "root"]).exception, InvalidRequest)
    assert isinstance(
        CliRunner().invoke(cli.app, ["token", "trainer", "--role", "control", "--out", str(out)]).exception, OSError
    ), "an existing token is not overwritten"


async def test_health_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    async with serving(FakeBackend(), settings=settings(authority.issue("server"))) as server:
        words = ("health", address(server), "--timeout", "10")
        code, text = await asyncio.to_thread(invoke, *words)
        assert code == 1 and "UNAVAILABLE" in text, "plain text"
        monkeypatch.setenv("ZERODRIFT_TLS_CA", str(authority.certificate))
        assert await asyncio.to_thread(invoke, *words) == (0, f"{address(server)}: SERVING\n")
        await server.set_serving(False)
        assert await asyncio.to_thread(invoke, *words) == (1, f"{address(server)}: NOT_SERVING\n")
