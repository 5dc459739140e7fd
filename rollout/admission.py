"""A backend that refuses at the door what no queue behind it could hold.

Engines have bounded queues of their own, but answer between two steps only. What is beyond all their queues together is
refused here, at once; what has no room for even one sample, before its request is read (``rollout/door.py``).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from rollout.config import Settings
from rollout.errors import CapacityExceeded, InvalidRequest
from rollout.metered import MeteredBackend, Polled
from rollout.metrics import Meter
from rollout.types import GenerateRequest, ScoreRequest, ScoreResult


class Admission:
    """Samples and scored sequences that were let in and have not ended, in all and by client."""

    def __init__(self, most: int, most_per_client: int) -> None:
        self._most, self._most_per_client = most, most_per_client
        self._live = 0
        self._by_client: dict[str, int] = {}

    @contextmanager
    def hold(self, client: str, count: int) -> Iterator[None]:
        """Room for ``count`` of the client's, for the length of the block.

        Raises:
            CapacityExceeded: there is none. InvalidRequest: there never is, for so many at once.
        """
        if count > self._most_per_client:
            raise InvalidRequest(
                f"{count} samples or sequences in one call; engines and their queues hold "
                f"{self._most_per_client} of one client (worker.count * (engine.max_running + "
                "engine.max_waiting_per_client)), and no waiting helps: send fewer a call"
            )
        if (error := self.no_room(client, count)) is not None:
            raise error
        self._live += count
        self._by_client[client] = self._by_client.get(client, 0) + count
        try:
            yield
        finally:
            self._live -= count
            self._by_client[client] -= count
            if not self._by_client[client]:
                del self._by_client[client]

    def no_room(self, client: str, count: int) -> CapacityExceeded | None:
        """Why ``count`` more of the client's cannot be held, None where they can."""
        mine = self._by_client.get(client, 0)
        if self._live + count > self._most:
            return CapacityExceeded(
                f"{self._live} samples are live and {count} more asked for; engines and their queues hold {self._most} "
                "(worker.count * (engine.max_running + engine.max_waiting)); try again later"
            )
        if mine + count > self._most_per_client:
            return CapacityExceeded(
                f"client {client!r} has {mine} live samples and asks for {count} more, its limit is "
                f"{self._most_per_client} (worker.count * (engine.max_running + engine.max_waiting_per_client)); "
                "wait for some to end"
            )
        return None


def admission_of(settings: Settings) -> Admission:
    """What all engines and their queues hold together."""
    engine, replicas = settings.engine, settings.worker.count
    waiting = engine.max_waiting
    per_client = engine.max_waiting_per_client
    mine = waiting - waiting // 8 if per_client is None else min(per_client, waiting)
    return Admission(replicas * (engine.max_running + waiting), replicas * (engine.max_running + mine))


class AdmittingBackend(MeteredBackend):
    """A metered backend behind an ``Admission``."""

    def __init__(self, inner: Polled, meter: Meter, settings: Settings) -> None:
        super().__init__(inner, meter, queue_limit=settings.engine.max_waiting)
        self._admission = admission_of(settings)
        self._max_n = settings.server.max_n
        self._names: set[str] = set()

    def no_room(self, client: str, request_id: str) -> CapacityExceeded | None:
        """Why there is no room for even one sample or sequence of the client's, None where there may be.

        A name that is live has room: a call that resumes it ends the live one and takes its place.
        """
        return None if request_id in self._names else self._admission.no_room(client, 1)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Any, None]:
        """See ``Backend``. Raises also: CapacityExceeded, before the inner backend is asked."""
        # An n out of range is refused by the inner backend, by name.
        count = request.n if 1 <= request.n <= self._max_n else 1
        with self._admission.hold(request.client, count), self._named(request.request_id):
            async with aclosing(super().generate(request)) as events:
                async for event in events:
                    yield event

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """See ``Backend``. Raises also: CapacityExceeded."""
        with self._admission.hold(request.client, len(request.sequences)):
            return await super().score(request)

    @contextmanager
    def _named(self, request_id: str) -> Iterator[None]:
        # The service above lets no two live requests have one name.
        self._names.add(request_id)
        try:
            yield
        finally:
            self._names.discard(request_id)
