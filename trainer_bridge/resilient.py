"""Generate through lost streams and gateways that come back: every sample once, with the bits of a calm run.

Sampling depends on seed and position alone (C2): a client that holds the first k tokens of a sample asks for it again
with those tokens, of whichever gateway answers, and gets token k. Nothing has to survive the gateway but the weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from rollout.codec import GenerateEvent
from rollout.errors import (
    CapacityExceeded,
    ParityError,
    ReplicaUnavailable,
    RequestAborted,
    RolloutError,
    WeightsMoved,
)
from rollout.spans import BegunSample, VersionSpan
from rollout.types import Completion, GenerateRequest, PromptChunk, SampleSummary, TokenChunk
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.wire import Assembler, GenerateResult

log = logging.getLogger(__name__)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0


async def generate_resumed(
    client: AsyncRolloutClient,
    request: GenerateRequest,
    *,
    within_s: float = 120.0,
    on_event: Callable[[GenerateEvent], None] | None = None,
) -> GenerateResult:
    """The whole answer to a request of token ids, over as many streams as it takes.

    Args:
        client: of the gateway's address, which a new gateway takes over.
        request: without a seed one is drawn here, so that every attempt draws the same tokens. An empty id gets one.
        within_s: seconds without any token after which the last failure is raised.
        on_event: receives every event once, in order.

    Raises:
        WeightsMoved: the weights that sampled a begun sample are no longer served; ask anew. ReplicaUnavailable: nobody
            answered within ``within_s``. RolloutError: as the service raised it. ParityError: the answers of two
            gateways do not fit together.
    """
    seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
    pinned = dataclasses.replace(
        request,
        request_id=request.request_id or secrets.token_hex(16),
        sampling=dataclasses.replace(request.sampling, seed=seed),
    )
    return await _Resumption(client, pinned, within_s, on_event or (lambda event: None)).run()


class _Resumption:
    """One request over several streams."""

    def __init__(
        self,
        client: AsyncRolloutClient,
        request: GenerateRequest,
        within_s: float,
        on_event: Callable[[GenerateEvent], None],
    ) -> None:
        self._client, self._request, self._within_s, self._on_event = client, request, within_s, on_event
        self._whole = Assembler(request)
        self._tokens: dict[int, list[int]] = {request.sample_index + i: [] for i in range(request.n)}
        self._spans: dict[int, list[VersionSpan]] = {index: [] for index in self._tokens}
        self._ends: dict[int, SampleSummary] = {}
        self._prompt = False
        self._last: Completion | None = None
        self._heard_at = 0.0

    async def run(self) -> GenerateResult:
        self._heard_at = asyncio.get_running_loop().time()
        if not await self._attempt([self._request]):
            await _until(lambda: self._attempt(self._rests()))
        if self._last is None:
            await _until(self._find_completion)
        last = self._last
        assert last is not None
        ends = tuple(self._ends[index] for index in sorted(self._ends))
        self._take(dataclasses.replace(last, request_id=self._request.request_id, samples=ends))
        return self._whole.result()

    def _rests(self) -> list[GenerateRequest]:
        """One request a sample that has not ended; the prompt's log-probs come with the first one."""
        alone, first = self._request.n == 1, self._request.sample_index
        return [
            dataclasses.replace(
                self._request,
                request_id=self._request.request_id if alone else f"{self._request.request_id}/{index}",
                n=1,
                sample_index=index,
                prompt_logprobs=self._request.prompt_logprobs and not self._prompt and index == first,
                resume=BegunSample(tuple(self._tokens[index]), tuple(self._spans[index])),
            )
            for index in self._tokens
            if index not in self._ends
        ]

    async def _find_completion(self) -> bool:
        """Every sample ended, and the stream broke before its last message; False as ``_attempt``."""
        try:
            self._last = await self._lost_completion()
        except RolloutError as failure:
            self._outlive(failure)
        return self._last is not None

    async def _lost_completion(self) -> Completion:
        """What the last message said, but for the samples."""
        room = (await self._client.info()).context_length - len(self._request.prompt_ids)
        asked = self._request.sampling
        one = dataclasses.replace(
            self._request,
            request_id="",
            n=1,
            prompt_logprobs=False,
            sampling=dataclasses.replace(asked, max_tokens=1),
        )
        async with aclosing(self._client.events(one)) as events:
            found = [event async for event in events if isinstance(event, Completion)]
        most = room if asked.max_tokens is None else min(asked.max_tokens, room)
        return dataclasses.replace(found[0], sampling=dataclasses.replace(found[0].sampling, max_tokens=most))

    async def _attempt(self, requests: list[GenerateRequest]) -> bool:
        """Whether every sample has ended; False after a failure that a later attempt may outlive."""
        outcomes = await asyncio.gather(*(self._follow(request) for request in requests), return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            self._outlive(failure)
        return not failures

    def _outlive(self, failure: BaseException) -> None:
        """Raise a failure after which no attempt can succeed, or none is made any more."""
        late = asyncio.get_running_loop().time() - self._heard_at > self._within_s
        full = isinstance(failure, CapacityExceeded) and any(self._tokens.values())
        if late or not (full or _passing(failure)):
            raise failure
        log.info("request %s broke off (%s); going on", self._request.request_id, failure)

    async def _follow(self, request: GenerateRequest) -> None:
        events: AsyncGenerator[GenerateEvent, None] = self._client.events(request)
        async with aclosing(events):
            async for event in events:
                self._heard_at = asyncio.get_running_loop().time()
                if isinstance(event, Completion):
                    self._complete(event)
                else:
                    self._take(event)

    def _complete(self, event: Completion) -> None:
        before = self._last
        if before is not None and (before.manifest_digest, before.sampling) != (event.manifest_digest, event.sampling):
            raise ParityError(
                f"request {self._request.request_id}: it was begun under manifest {before.manifest_digest} and "
                f"{before.sampling}, and went on under {event.manifest_digest} and {event.sampling}"
            )
        self._last = event

    def _take(self, event: GenerateEvent) -> None:
        self._whole.add(event)
        if isinstance(event, TokenChunk):
            have, spans = self._tokens[event.sample_index], self._spans[event.sample_index]
            start = len(have)
            have += event.token_ids.tolist()
            if spans and spans[-1].version == event.weight_version:
                start = spans.pop().start
            spans.append(VersionSpan(event.weight_version, start, len(have)))
        elif isinstance(event, SampleSummary):
            self._ends[event.sample_index] = event
        elif isinstance(event, PromptChunk):
            self._prompt = True
        self._on_event(event)


async def _until(attempt: Callable[[], Awaitable[bool]]) -> None:
    """Attempts, with longer and longer pauses between them, until one succeeds; what one raises ends them."""
    wait = _FIRST_WAIT_S
    while not await attempt():
        await asyncio.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_S)


def _passing(failure: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(failure, WeightsMoved):
        return False
    # A gateway that stops cancels what still runs.
    cancelled = isinstance(failure, RequestAborted) and "CANCELLED" in str(failure)
    return isinstance(failure, ReplicaUnavailable) or cancelled
