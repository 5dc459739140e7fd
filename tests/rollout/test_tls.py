"""TLS and mutual TLS between real servers and both clients; certificates made for the test."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from rollout.config import ServerSettings, Settings
from rollout.errors import ConfigError, PermissionDenied, ReplicaUnavailable
from rollout.server import start_server
from rollout.tls import server_credentials
from rollout.types import SamplingParams
from tests.certificates import Authority, Pair
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.client import RolloutClient
from trainer_bridge.wire.channel import ENVIRONMENT, ClientSecurity

SAMPLING = SamplingParams(seed=1, max_tokens=4)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


def settings(pair: Pair, client_ca: Path | None = None) -> ServerSettings:
    return ServerSettings(
        tls_certificate=str(pair.certificate),
        tls_key=str(pair.key),
        tls_client_ca=None if client_ca is None else str(client_ca),
    )


def shown(authority: Authority, own: Pair | None = None) -> ClientSecurity:
    if own is None:
        return ClientSecurity(ca=authority.certificate)
    return ClientSecurity(ca=authority.certificate, certificate=own.certificate, key=own.key)


async def reach(where: str, security: ClientSecurity | None) -> str:
    async with AsyncRolloutClient(where, security=security, timeout_s=10) as client:
        try:
            return (await client.info()).model
        except ReplicaUnavailable:
            return "not reached"


async def test_both_clients_speak_tls_and_nothing_else_gets_in(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "another ca")
    async with serving(FakeBackend(), settings=settings(pair)) as server:
        where = address(server)
        assert await reach(where, shown(authority)) == "fake"
        assert await reach(where.replace("127.0.0.1", "localhost"), shown(authority)) == "fake"
        with RolloutClient(where, security=shown(authority)) as client:
            assert (await asyncio.to_thread(client.generate, [3], SAMPLING)).samples
        assert await reach(where, None) == "not reached", "plain text"
        assert await reach(where, shown(stranger)) == "not reached", "a server of an unknown authority"
        wrong = ClientSecurity(ca=authority.certificate, server_name="example.org")
        assert await reach(where, wrong) == "not reached", "another name than the certificate's"


async def test_mutual_tls_asks_for_a_certificate_and_names_the_caller(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    own, foreign = authority.issue("trainer-7"), Authority(tmp_path, "another ca").issue("stranger")
    backend = FakeBackend()
    async with serving(backend, settings=settings(pair, authority.certificate)) as server:
        where = address(server)
        assert await reach(where, shown(authority)) == "not reached", "without a certificate"
        assert await reach(where, shown(authority, foreign)) == "not reached", "of another authority"
        for client_id in ("", "trainer-7"):
            async with AsyncRolloutClient(where, security=shown(authority, own), client_id=client_id) as client:
                await client.generate([3], SAMPLING)
        async with AsyncRolloutClient(where, security=shown(authority, own), client_id="other") as client:
            with pytest.raises(PermissionDenied, match="trainer-7"):
                await client.generate([3], SAMPLING)
    assert [request.client for request in backend.seen] == ["trainer-7", "trainer-7"]


async def test_certificates_are_replaced_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = Authority(tmp_path / "old", "old ca"), Authority(tmp_path / "new", "new ca")
    pair = old.issue("server")
    async with serving(FakeBackend(), settings=settings(pair)) as server:
        where = address(server)
        assert (await reach(where, shown(old)), await reach(where, shown(new))) == ("fake", "not reached")
        fresh = new.issue("server")
        pair.key.write_bytes(fresh.key.read_bytes())
        assert await reach(where, shown(old)) == "fake", "between two files of one rotation"
        assert "stays in force" in caplog.text
        pair.certificate.write_bytes(fresh.certificate.read_bytes())
        assert (await reach(where, shown(old)), await reach(where, shown(new))) == ("not reached", "fake")


async def test_beyond_loopback_with_tls_needs_no_word(pair: Pair) -> None:
    server = await start_server(FakeBackend(), host="0.0.0.0", port=0, reflection=False, settings=settings(pair))
    await server.stop(None)
    Settings.model_validate({"server": settings(pair).model_dump() | {"host": "0.0.0.0"}})


def test_files_that_cannot_be_used_are_refused_at_start(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    other = authority.issue("other")
    for certificate, key, ca in (
        (pair.certificate, other.key, None),
        (pair.key, pair.key, None),
        (tmp_path / "absent", pair.key, None),
        (pair.certificate, pair.key, pair.key),
    ):
        with pytest.raises(ConfigError) as caught:
            server_credentials(settings(Pair(certificate, key), ca))
        assert caught.value.field == "server.tls_certificate"
    assert server_credentials(ServerSettings()) is None
    assert server_credentials(settings(pair, authority.certificate)) is not None, "control"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tls_key": "k"}, "belong together"),
        ({"tls_certificate": "c"}, "belong together"),
        ({"tls_client_ca": "c"}, "needs tls_certificate"),
        ({"log_prompts": True}, "log_requests"),
    ],
)
def test_settings_that_make_no_whole(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerSettings.model_validate(fields)


class TestClientSecurity:
    def test_halves_are_refused(self, tmp_path: Path) -> None:
        for fields, says in (
            ({"certificate": tmp_path}, "belong together"),
            ({"certificate": tmp_path, "key": tmp_path}, "needs TLS"),
            ({"token": "a", "token_file": tmp_path}, "choose one"),
        ):
            with pytest.raises(ConfigError, match=says):
                ClientSecurity(**fields)  # type: ignore[arg-type]

    def test_a_token_does_not_travel_in_the_clear(self, authority: Authority) -> None:
        bare = ClientSecurity(token="abc")
        for where in ("192.0.2.1:5", "example.org:5", "[2001:db8::1]:5"):
            with pytest.raises(ConfigError, match="without TLS"):
                RolloutClient(where, security=bare)
            bare_but_told = ClientSecurity(token="abc", allow_insecure=True)
            for fine in (bare_but_told, ClientSecurity(token="abc", ca=authority.certificate), ClientSecurity()):
                RolloutClient(where, security=fine).close()
        for where in ("127.0.0.1:5", "localhost:5", "[::1]:5", "unix:/tmp/x"):
            RolloutClient(where, security=bare).close()

    def test_it_does_not_show_its_token(self) -> None:
        assert "abc" not in repr(ClientSecurity(token="abc"))

    @pytest.mark.parametrize("token", ["", "two words", "ü", "line\nbreak"])
    def test_tokens_that_no_header_holds(self, token: str) -> None:
        with pytest.raises(ConfigError) as caught:
            ClientSecurity(token=token).headers()
        assert token == "" or token not in caught.value.message

    def test_from_the_environment(self, monkeypatch: pytest.MonkeyPatch, authority: Authority) -> None:
        for variable in ENVIRONMENT.values():
            monkeypatch.delenv(variable, raising=False)
        assert ClientSecurity.from_environment() == ClientSecurity()
        monkeypatch.setenv("ZERODRIFT_TLS_CA", str(authority.certificate))
        monkeypatch.setenv("ZERODRIFT_TOKEN", "abc")
        wanted = ClientSecurity(ca=authority.certificate, token="abc")
        assert ClientSecurity.from_environment() == wanted
        assert ClientSecurity.towards("host:1", ServerSettings()) == wanted
        assert ClientSecurity.towards(None, ServerSettings()) == ClientSecurity(), "our own asks for nothing"
        assert ClientSecurity.towards(None, ServerSettings(tokens="file")) == wanted

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            RolloutClient("127.0.0.1:5", security=ClientSecurity(ca=tmp_path / "absent"))


def test_openssl_agrees_about_the_authority(authority: Authority, pair: Pair) -> None:
    """Control of the test's own certificates."""
    words = ["openssl", "verify", "-CAfile", str(authority.certificate), str(pair.certificate)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no openssl")
    assert done.returncode == 0, done.stderr
