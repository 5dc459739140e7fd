"""Counters of what each client was served."""

from __future__ import annotations

import pytest

from rollout import shares
from rollout.shares import ClientShares


def test_counters_grow_with_what_is_served() -> None:
    counters = ClientShares()
    for client in "ab":
        counters.join(client)
    counters.charge("a", 5)
    counters.charge("a", 2)
    assert (counters.served("a"), counters.served("b")) == (7, 0)
    counters.check({"a": 1, "b": 1})


def test_a_newcomer_starts_at_the_least() -> None:
    """Else it would be owed all that the others ever got."""
    counters = ClientShares()
    for client in "ab":
        counters.join(client)
    counters.charge("a", 100)
    counters.charge("b", 70)
    counters.join("c")
    assert counters.served("c") == 70


def test_who_leaves_and_comes_back_still_owes() -> None:
    counters = ClientShares()
    for client in "ab":
        counters.join(client)
    counters.charge("a", 100)
    counters.leave("a")
    counters.join("a")
    assert (counters.served("a"), counters.served("b")) == (100, 0)
    counters.leave("b")
    counters.charge("a", 50)
    counters.join("b")
    assert counters.served("b") == 150, "idleness saves up nothing"


def test_an_idle_engine_forgets() -> None:
    counters = ClientShares()
    counters.join("a")
    counters.charge("a", 100)
    counters.leave("a")
    counters.join("b")
    counters.join("a")
    assert (counters.served("a"), counters.served("b")) == (0, 0)


def test_gone_clients_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_CLIENTS", 20)
    counters = ClientShares()
    counters.join("steady")
    for number in range(1000):
        counters.join(f"c{number}")
        counters.charge(f"c{number}", 10)
        counters.leave(f"c{number}")
    assert len(counters._served) <= 21 and counters.served("steady") == 0


def test_a_wrong_count_is_seen() -> None:
    counters = ClientShares()
    counters.join("a")
    with pytest.raises(AssertionError, match="live clients"):
        counters.check({"a": 2})
