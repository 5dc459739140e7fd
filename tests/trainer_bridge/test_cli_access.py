"""Every verb that calls a service brings TLS and the token of the environment, and takes no address that is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rollout import cli
from rollout.access import new_token
from rollout.call_scope import Role
from rollout.errors import ConfigError
from rollout.serving import Service, running_service
from tests.certificates import Authority
from tests.rollout.test_cli import VERBS
from tests.services import soon, tiny_settings
from trainer_bridge.wire.channel import check_address

SIZES = ("engine.page_size=16", "model.dtype=float32", "model.context_length=512")


def words(model: Path, folder: Path) -> dict[str, tuple[str, ...]]:
    """Verb -> its words before ``--address``; later ones read what earlier ones wrote."""
    same = f"model.path={model}", *SIZES
    rollouts = str(folder / "rollouts.jsonl")
    return {
        "generate": ("generate", "--prompts", str(folder / "prompts"), "--out", rollouts, "--max-tokens", "5"),
        "replay": ("replay", rollouts),
        "explain": ("explain", rollouts, "--thorough", *same),
        "weights verify": ("weights", "verify"),
        "replicas list": ("replicas", "list"),
        "replicas drain": ("replicas", "drain", "replica-0"),
        "replicas undrain": ("replicas", "undrain", "replica-0"),
        "replicas restart": ("replicas", "restart", "replica-0"),
    }


def verbs_with_address(group: Any, prefix: str = "") -> set[str]:
    found = set()
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= verbs_with_address(command, f"{prefix}{name} ")
        elif any("--address" in p.opts for p in command.params):
            found.add(prefix + name)
    return found


@asynccontextmanager
async def guarded(model: Path, folder: Path, authority: Authority) -> AsyncIterator[Service]:
    """TLS, and tokens for whoever calls."""
    pair = authority.issue("server")
    token, line = new_token("operator", Role.CONTROL)
    (folder / "tokens").write_text(line + "\n")
    (folder / "token").write_text(token + "\n")
    settings = tiny_settings(model)
    server = {
        "tls_certificate": str(pair.certificate),
        "tls_key": str(pair.key),
        "tokens": str(folder / "tokens"),
        "debug": True,
    }
    update = settings.server.model_copy(update=server)
    async with running_service(settings.model_copy(update={"server": update}), in_process=True) as service:
        yield service


async def run(*arguments: str) -> Any:
    return await soon(asyncio.to_thread(CliRunner().invoke, cli.app, list(arguments)))


async def test_every_verb_gets_through(tiny_qwen3_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert VERBS, "registers every verb"
    tried = words(tiny_qwen3_path, tmp_path)
    # The dashboard hands its address, with the environment, to the verb explain; submit's is Ray's.
    known = {*tried, "dashboard", "submit"}
    assert known == verbs_with_address(typer.main.get_command(cli.app)), "a new verb belongs into the table"
    (tmp_path / "prompts").write_text(json.dumps({"prompt_ids": [3, 4, 5]}) + "\n")
    authority = Authority(tmp_path / "ca")
    async with guarded(tiny_qwen3_path, tmp_path, authority) as service:
        at = ("--address", service.address)
        assert (await run("replicas", "list", *at)).exit_code != 0, "control: neither TLS nor token"
        monkeypatch.setenv("ZERODRIFT_TLS_CA", str(authority.certificate))
        said = await run("replicas", "list", *at)
        assert said.exit_code != 0 and "UNAUTHENTICATED" in str(said.exception), "control: TLS, no token"
        monkeypatch.setenv("ZERODRIFT_TOKEN_FILE", str(tmp_path / "token"))
        for verb, line in tried.items():
            said = await run(*line, *at)
            if verb == "replicas restart":
                assert "worker.max_restarts" in str(said.exception), "in this process there is nothing to start again"
            else:
                assert said.exit_code == 0, (verb, said.output, said.exception)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("http://10.0.0.1:50051", "here '10.0.0.1:50051'"),
        ("HTTPS://host:50051/", "here 'host:50051'"),
        ("grpc://host:50051", "is a URL"),
        ("localhost", "not host:port"),
        ("host:", "not host:port"),
        (":50051", "not host:port"),
        ("host:0", "1 to 65535"),
        ("host:65536", "1 to 65535"),
        ("host:http", "not host:port"),
        ("", "not host:port"),
    ],
)
def test_what_is_no_address(address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_address(address)
    assert caught.value.field == "address"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "host.example:65535",
        "[::1]:50051",
        "dns:///host:1",
        "unix:/tmp/x",
        "unix:///tmp/x",
        "ipv6:[::1]:7",
    ],
)
def test_what_is_one(address: str) -> None:
    check_address(address)
