"""Sequences that wait for admission, and whose turn it is.

By priority, then by least served client, then by arrival; but every ``OLDEST_EVERY``-th admission goes to whoever has
waited longest. So a sequence with w others before it is among the next ``OLDEST_EVERY * (w + 1)`` admissions, whatever
arrives after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from rollout.errors import CapacityExceeded
from rollout.sequence import Sequence
from rollout.shares import ClientShares

OLDEST_EVERY = 8
"""One admission in so many ignores priorities and shares."""

_Queue = OrderedDict[Sequence, None]
"""In order of arrival; a member leaves in constant time."""


class WaitingRoom:
    """Bounded, overall and by client."""

    def __init__(self, shares: ClientShares, most: int, most_per_client: int) -> None:
        self._shares = shares
        self._most = most
        self._most_per_client = most_per_client
        self._all: _Queue = OrderedDict()
        self._levels: dict[int, dict[str, _Queue]] = {}
        self._by_client: dict[str, int] = {}
        self._admissions = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of arrival."""
        return iter(self._all)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._all

    def check_room(self, client: str) -> None:
        """Raise CapacityExceeded when the client may not queue one more."""
        if len(self._all) >= self._most:
            raise CapacityExceeded(
                f"the queue holds {len(self._all)} sequences, its limit (engine.max_waiting); try again later"
            )
        mine = self._by_client.get(client, 0)
        if mine >= self._most_per_client:
            raise CapacityExceeded(
                f"client {client!r} has {mine} sequences in the queue, its limit (engine.max_waiting_per_client); "
                "wait for some to end"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue behind all of the same client and priority."""
        self._all[sequence] = None
        level = self._levels.setdefault(sequence.priority, {})
        level.setdefault(sequence.client, OrderedDict())[sequence] = None
        self._by_client[sequence.client] = self._by_client.get(sequence.client, 0) + 1

    def next(self) -> Sequence | None:
        """Whose turn it is. The turn of the oldest stays until it is admitted, so a large one is not passed over."""
        if not self._all:
            return None
        if self._admissions % OLDEST_EVERY == OLDEST_EVERY - 1:
            return next(iter(self._all))
        heads = [next(iter(queue)) for queue in self._levels[max(self._levels)].values()]
        return min(heads, key=lambda head: (self._shares.served(head.client), head.arrival))

    def admit(self, sequence: Sequence) -> None:
        """It has had its turn."""
        self.remove(sequence)
        self._admissions += 1

    def remove(self, sequence: Sequence) -> None:
        """It leaves the queue, admitted or not."""
        del self._all[sequence]
        level = self._levels[sequence.priority]
        queue = level[sequence.client]
        del queue[sequence]
        if not queue:
            del level[sequence.client]
        if not level:
            del self._levels[sequence.priority]
        self._by_client[sequence.client] -= 1
        if not self._by_client[sequence.client]:
            del self._by_client[sequence.client]

    def check(self) -> None:
        """Raise AssertionError unless the queues by client hold what the whole holds, in order of arrival."""
        arrivals = [s.arrival for s in self._all]
        assert arrivals == sorted(arrivals), "the queue is out of order"
        parts = [queue for level in self._levels.values() for queue in level.values()]
        assert all(parts) and sum(map(len, parts)) == len(self._all), "a queue is empty or lost"
        assert all(s in self._all for queue in parts for s in queue), "a queue holds a stranger"
        assert sum(self._by_client.values()) == len(self._all), "a client is miscounted"
