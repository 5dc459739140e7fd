"""Who may reach the dashboard, and how it is stopped."""

from __future__ import annotations

import ssl
import threading
import urllib.request
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from tests.certificates import Authority
from tests.trainer_bridge.store.runs import record_run
from trainer_bridge.dashboard.serve import access_token, bind, make_server, page_address, page_tls, serving_beside


def test_a_token_is_made_beyond_loopback_only() -> None:
    assert access_token("127.0.0.1", None) is None and access_token("localhost", "") is None
    assert access_token("127.0.0.1", "mine") == "mine"
    made = {access_token("0.0.0.0", None) for _ in range(3)}
    assert len(made) == 3 and all(token and len(token) >= 24 for token in made)


def test_the_address_carries_the_token_in_its_fragment() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert page_address(listener, "abc") == f"http://127.0.0.1:{port}/#token=abc"
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be bound"):
            bind("127.0.0.1", port)


def test_it_serves_beside_other_work_and_stops(tmp_path: Path) -> None:
    record_run(tmp_path, steps=1)
    with bind("127.0.0.1", 0) as listener:
        address = page_address(listener, None)
        with serving_beside(tmp_path, listener, token=None), urllib.request.urlopen(address, timeout=30) as answer:
            assert b"zerodrift" in answer.read()


def test_beyond_loopback_it_asks_for_tls_or_a_word(tmp_path: Path) -> None:
    pair, other = Authority(tmp_path).issue("a"), Authority(tmp_path / "b").issue("b")
    with pytest.raises(ConfigError, match="--allow-insecure"):
        page_tls("0.0.0.0", None, None, allow_insecure=False)
    assert page_tls("0.0.0.0", None, None, allow_insecure=True) is None
    assert page_tls("127.0.0.1", None, None, allow_insecure=False) is None
    assert page_tls("0.0.0.0", pair.certificate, pair.key, allow_insecure=False) is not None
    for certificate, key in ((pair.certificate, None), (None, pair.key), (pair.certificate, other.key)):
        with pytest.raises(ConfigError, match="--tls-"):
            page_tls("127.0.0.1", certificate, key, allow_insecure=True)


def test_it_serves_https(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    record_run(tmp_path / "runs", steps=1)
    tls = page_tls("127.0.0.1", pair.certificate, pair.key, allow_insecure=False)
    with bind("127.0.0.1", 0) as listener:
        address = page_address(listener, None, tls)
        server = make_server(tmp_path / "runs", token=None, tls=tls)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            trust = ssl.create_default_context(cafile=str(authority.certificate))
            with urllib.request.urlopen(address, timeout=30, context=trust) as answer:
                assert address.startswith("https:") and b"zerodrift" in answer.read()
        finally:
            server.should_exit = True
            thread.join(20)
