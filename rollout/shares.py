"""How much each client has been served: the virtual token counters of fair admission (Sheng et al., OSDI 2024).

A client's counter grows by the tokens fed for it. Whoever has the least goes first. A client that comes (back) starts
no lower than the least of those that are there, so idleness saves up nothing; one that leaves keeps what it owes for as
long as others keep the engine busy.
"""

from __future__ import annotations

MAX_CLIENTS = 10_000
"""Counters kept of clients that are gone; beyond it their debts are forgotten."""


class ClientShares:
    """Tokens served by client, over the present busy period."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._live: dict[str, int] = {}

    def join(self, client: str) -> None:
        """One more live sequence of the client."""
        if client not in self._live:
            if not self._live:
                # Nobody was kept waiting: a new busy period starts even.
                self._served.clear()
            floor = min((self._served[other] for other in self._live), default=0)
            self._served[client] = max(self._served.get(client, 0), floor)
        self._live[client] = self._live.get(client, 0) + 1

    def leave(self, client: str) -> None:
        """One live sequence less."""
        self._live[client] -= 1
        if self._live[client]:
            return
        del self._live[client]
        floor = min((self._served[other] for other in self._live), default=0)
        if self._served[client] <= floor:
            # On return it would start there anyway.
            del self._served[client]
        if len(self._served) > len(self._live) + MAX_CLIENTS:
            self._served = {other: self._served[other] for other in self._live}

    def charge(self, client: str, tokens: int) -> None:
        """The client was given ``tokens`` tokens of work."""
        self._served[client] += tokens

    def served(self, client: str) -> int:
        """The counter of a client with live sequences."""
        return self._served[client]

    def check(self, live: dict[str, int]) -> None:
        """Raise AssertionError unless exactly these clients are live."""
        assert self._live == live, f"live clients are {live}, the counters say {self._live}"
        assert self._live.keys() <= self._served.keys(), "a live client has no counter"
