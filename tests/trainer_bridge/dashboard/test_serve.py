"""Who may reach the dashboard, and how it is stopped."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from tests.trainer_bridge.store.runs import record_run
from trainer_bridge.dashboard.serve import access_token, bind, page_address, serving_beside


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
