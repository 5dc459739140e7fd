"""One life of one replica, as the router sees it. A replica that is started again gets a new slot."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rollout.errors import ReplicaUnavailable, RolloutError
from rollout.replica import Replica
from rollout.spans import BegunSample, VersionSpan
from rollout.types import SampleRequest, ScoreOptions, ScoreSequence, TokenChunk


class EventQueue(Protocol):
    """Where the router leaves events: a ``StreamBuffer``, or an ``asyncio.Queue``."""

    def put_nowait(self, event: Any, /) -> None:
        """Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """One sequence to score, as a replica takes it."""

    sequence: ScoreSequence
    options: ScoreOptions


@dataclass(slots=True, eq=False)
class LiveSample:
    """A sample or scored sequence between submission and its last event."""

    request: SampleRequest | None
    queue: EventQueue
    """Receives PromptChunk, TokenChunk, SampleSummary, ScoreEvent or one RolloutError."""
    token_ids: list[int] = field(default_factory=list)
    """tokens already passed on; a replay goes on behind them"""
    spans: list[VersionSpan] = field(default_factory=list)
    """weight versions of those tokens"""
    prompt_delivered: bool = False
    """whether the prompt's log-probs were passed on"""
    versions: set[int] = field(default_factory=set)
    """weight versions of what was delivered, the prompt's log-probs included"""
    deaths: int = 0
    """replicas that left rotation while they held it"""
    moved: bool = False
    """whether it goes on where another replica, or another gateway, left off"""
    score: ScoreCall | None = None
    """what to score, when ``request`` is None"""
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    """set while a replica has it, or once it has failed; clear while a replay looks for a replica"""

    @classmethod
    def resumed(cls, request: SampleRequest, begun: BegunSample, queue: EventQueue) -> LiveSample:
        """One whose client has its beginning."""
        versions = {span.version for span in begun.spans}
        return cls(request, queue, [*begun.token_ids], [*begun.spans], bool(begun.token_ids), versions, moved=True)

    @property
    def delivered(self) -> int:
        """Tokens already passed on."""
        return len(self.token_ids)

    def deliver(self, chunk: TokenChunk) -> None:
        """Pass on tokens that come right behind the delivered ones."""
        start = self.delivered
        self.token_ids += chunk.token_ids.tolist()
        self.versions.add(chunk.weight_version)
        if self.spans and self.spans[-1].version == chunk.weight_version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(chunk.weight_version, start, self.delivered))
        self.queue.put_nowait(chunk)

    def rest(self) -> SampleRequest:
        """The request for what is still to be sampled."""
        assert self.request is not None, "scored sequences are scored again, whole"
        return replace(
            self.request,
            begun=BegunSample(tuple(self.token_ids), tuple(self.spans)),
            prompt_logprobs=self.request.prompt_logprobs and not self.prompt_delivered,
        )


class Slot:
    """A replica, what it holds, and whether it is in rotation. Once ``leave`` was called nothing it says counts."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.live: dict[str, LiveSample] = {}
        self.drained = False
        """whether an operator took it out of rotation"""
        self.stale = ""
        """why its weights are not those of the service, "" when they are"""
        self.tasks: list[asyncio.Task[None]] = []
        """readers of its events and of its progress"""
        self._gone: asyncio.Future[RolloutError] | None = None
        self._reason: RolloutError | None = None

    @property
    def name(self) -> str:
        """Of the replica; its next life has the same one."""
        return self.replica.name

    @property
    def alive(self) -> bool:
        """Whether it is in the service at all."""
        return self._reason is None

    @property
    def hold(self) -> str:
        """Why no samples may go there, "" when they may; calls to all reach it either way."""
        return self.stale or ("it is drained" if self.drained else "")

    @property
    def serving(self) -> bool:
        """Whether it takes samples."""
        return self.alive and not self.hold

    @property
    def reason(self) -> str:
        """Why it left, "" while it has not."""
        return "" if self._reason is None else str(self._reason)

    def leave(self, reason: RolloutError) -> dict[str, LiveSample]:
        """Out of rotation for good: calls under way end with ReplicaUnavailable. Returns what it held."""
        self._reason = reason
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(reason)
        orphans, self.live = self.live, {}
        return orphans

    async def call(self, method: str, *args: Any) -> Any:
        """Call the worker. The call needs no deadline of its own: a worker that hangs leaves, and that ends it.

        Raises:
            ReplicaUnavailable: the worker is gone or left during the call. RolloutError: as the worker raised it.
        """
        if self._reason is not None:
            raise _left(self.name, self._reason)
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
        call = asyncio.ensure_future(self.replica.call(method, *args))
        try:
            await asyncio.wait({call, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise _left(self.name, self._gone.result())
        finally:
            if not call.done():
                call.cancel()


def _left(name: str, reason: RolloutError) -> ReplicaUnavailable:
    return ReplicaUnavailable(f"worker {name} left rotation: {reason}")
