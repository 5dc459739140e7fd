"""The replicas as one service backend: least-loaded routing, event dispatch, updates on all replicas or on none.

A request's samples go to one replica. When that replica dies, its unfinished samples are replayed on another with the
same weight version: sampling depends on nothing else (C2), so the tokens already delivered come again with the same
bits and are skipped, and the client sees one unbroken sample.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from rollout.backend import Backend
from rollout.config import Settings
from rollout.detokenize import Detokenizer
from rollout.errors import (
    InvalidRequest,
    NotFound,
    ParityError,
    ReplicaUnavailable,
    RolloutError,
    UnsupportedFeature,
)
from rollout.events import ScoreEvent
from rollout.manifest import manifest_digest
from rollout.replica import Replica
from rollout.request_limits import check_answer_size, check_limits
from rollout.router import Router
from rollout.sampling import draw_seed
from rollout.slot import LiveSample
from rollout.spans import NOT_BEGUN
from rollout.stream_buffer import StreamBuffers
from rollout.temperature import checked_temperature
from rollout.tracing import traceparent
from rollout.types import (
    Completion,
    EngineStats,
    GenerateRequest,
    LogprobMode,
    PromptChunk,
    ReplicaLoad,
    SampleRequest,
    SampleSummary,
    ScoreRequest,
    ScoreResult,
    SequenceScore,
    ServerInfo,
    TokenChunk,
    UpdatePart,
    WeightState,
    WeightUpdate,
)
from rollout.watch import progress_limits
from rollout.weight_intake import Intake
from rollout.weight_updates import commit_all, digests_of_all, stage_all, to_the_end
from rollout.worker import WorkerInfo

log = logging.getLogger(__name__)
_MAX_SCORE_ATTEMPTS = 4


class Pool(Backend):
    """Backend over N replicas."""

    def __init__(self, replicas: list[Replica], settings: Settings, model: str, tokenizer: Detokenizer | None) -> None:
        self._settings = settings
        self._model = model
        self._tokenizer = tokenizer
        self.router = self._router = Router(replicas, progress_limits(settings))
        self._buffers = StreamBuffers(settings.server)
        self._info: WorkerInfo | None = None
        self._weights = WeightState(-1, "")
        self._paused = False
        self._update_lock = asyncio.Lock()
        self._requests: dict[str, list[str]] = {}

    async def start(self) -> None:
        """Wait for every replica and begin to fetch events.

        Raises:
            ReplicaUnavailable: a replica did not come up in time. ParityError: replicas differ in manifest or weights.
        """
        worker = self._settings.worker
        asked = f"{worker.num_cpus:g} CPUs {worker.resources or ''}".strip()
        infos = await self._router.first_infos(worker.start_timeout_s, asked)
        for info in infos[1:]:
            if info.manifest != infos[0].manifest or info.weights != infos[0].weights:
                raise ParityError(f"replicas {infos[0].name} and {info.name} differ in manifest or weights")
        self._info, self._weights = infos[0], infos[0].weights
        self._router.start()

    def when_serving_changes(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        """Call ``set_serving`` when the last replica leaves rotation, and when one is back."""
        self._router.when_serving_changes(set_serving)

    async def stop(self) -> None:
        """Abort what is live, stop every replica."""
        await self._router.stop()

    @property
    def paused(self) -> bool:
        """Whether sampling is to stand still."""
        return self._paused

    @asynccontextmanager
    async def steady(self) -> AsyncIterator[WorkerInfo]:
        """What a replica has to be like to join; weights cannot change inside."""
        async with self._update_lock:
            yield dataclasses.replace(self._require_info(), weights=self._weights)

    @property
    def num_live(self) -> int:
        """Samples not yet answered."""
        return self._router.num_live

    # ---- generate -----------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[PromptChunk | TokenChunk | SampleSummary | Completion, None]:
        """All samples on one replica; their events in order of arrival, then one ``Completion``.

        Raises:
            InvalidRequest: n, sample_index, prompt, sampling, priority or top_logprobs out of range.
            CapacityExceeded: the replica's queue, or this client's part of it, is full.
            ReplicaUnavailable: no replica could finish. WeightsMoved: nor go on with what was begun. RequestAborted:
                the reader fell too far behind.
        """
        samples = [dataclasses.replace(s, trace=traceparent()) for s in await self._samples(request)]
        ids = [s.sample_id for s in samples]
        self._requests[request.request_id] = ids
        queue = self._buffers.open()
        try:
            if request.resume is not None:
                await self._router.submit_begun(LiveSample.resumed(samples[0], request.resume, queue))
            else:
                await self._router.submit([LiveSample(s, queue) for s in samples])
            summaries: list[SampleSummary] = []
            while len(summaries) < len(samples):
                event = await queue.get()
                if isinstance(event, RolloutError):
                    raise event
                if isinstance(event, SampleSummary):
                    summaries.append(event)
                yield event
            yield Completion(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                sampling=samples[0].sampling,
                samples=tuple(sorted(summaries, key=lambda s: s.sample_index)),
                manifest_digest=self.manifest_digest,
            )
        finally:
            queue.close()
            self._requests.pop(request.request_id, None)
            await self._router.drop(ids, "the client left")

    async def _samples(self, request: GenerateRequest) -> list[SampleRequest]:
        most = self._settings.server.max_n
        if not 1 <= request.n <= most:
            raise InvalidRequest(f"n = {request.n} is outside [1, {most}] (server.max_n)", field="n")
        if not 0 <= request.sample_index <= 2**31 - 1 - request.n:
            raise InvalidRequest(
                f"sample_index = {request.sample_index} is outside [0, 2^31 - n)", field="sample_index"
            )
        check_limits(request, self._settings.server)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=draw_seed())
        unique = secrets.token_hex(6)
        first: SampleRequest = await self._router.any(
            "check",
            SampleRequest(
                f"{request.request_id}/{unique}/{request.sample_index}",
                request.prompt_ids,
                sampling,
                request.sample_index,
                request.row_digests,
                request.top_logprobs,
                request.prompt_logprobs,
                request.priority,
                request.client,
                images=request.images,
                begun=request.resume or NOT_BEGUN,
            ),
        )
        # The prompt is the same for all: one of them says its log-probs, the others may use its pages.
        return [
            dataclasses.replace(
                first,
                sample_id=f"{request.request_id}/{unique}/{i}",
                sample_index=i,
                prompt_logprobs=request.prompt_logprobs and i == request.sample_index,
            )
            for i in range(request.sample_index, request.sample_index + request.n)
        ]

    async def abort(self, request_id: str) -> int:
        """End one request's samples, or everyone's for "".

        Raises:
            NotFound: no live request has this id.
        """
        if request_id and request_id not in self._requests:
            raise NotFound(f"no live request {request_id!r}", field="request_id")
        chosen = [self._requests[request_id]] if request_id else list(self._requests.values())
        return await self._router.abort([i for ids in chosen for i in ids], "aborted by the client")

    # ---- score --------------------------------------------------------------------------------------------------

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Score on one replica; sequences that an update overtook are scored again.

        Raises:
            InvalidRequest: nothing to score, a sequence or option out of range, or an answer that would not fit one
                message. CapacityExceeded: the queue is full. ReplicaUnavailable: weights kept changing.
        """
        if not request.sequences:
            raise InvalidRequest("no sequences to score", field="sequences")
        check_limits(request, self._settings.server)
        check_answer_size(request, self._settings.server.max_message_bytes)
        done: dict[int, ScoreEvent] = {}
        wanted = list(range(len(request.sequences)))
        for _ in range(_MAX_SCORE_ATTEMPTS):
            done |= await self._score_some(request, wanted)
            newest = max(event.weight_version for event in done.values())
            # An update may have come between two sequences: one answer speaks of one version.
            wanted = [i for i, event in done.items() if event.weight_version != newest]
            if not wanted:
                return self._score_result(request, done, newest)
        raise ReplicaUnavailable("weights changed during every attempt to score; try again")

    async def _score_some(self, request: ScoreRequest, wanted: list[int]) -> dict[int, ScoreEvent]:
        unique = secrets.token_hex(6)
        ids = {f"{request.request_id}/{unique}/score/{i}": i for i in wanted}
        queue: asyncio.Queue[Any] = asyncio.Queue()
        results: dict[int, ScoreEvent] = {}
        try:
            await self._router.submit_scores(list(ids), [request.sequences[i] for i in wanted], request.options, queue)
            while len(results) < len(ids):
                event = await queue.get()
                if isinstance(event, RolloutError):
                    raise event
                results[ids[event.sample_id]] = event
            return results
        finally:
            await self._router.drop(list(ids), "the client left")

    def _score_result(self, request: ScoreRequest, done: dict[int, ScoreEvent], version: int) -> ScoreResult:
        scores: list[SequenceScore] = [done[i].score for i in range(len(request.sequences))]
        return ScoreResult(
            request_id=request.request_id,
            scores=tuple(scores),
            temperature=checked_temperature(request.temperature, "temperature"),
            mode=LogprobMode.GREEDY_T1 if request.temperature == 0 else LogprobMode.TEMPERED,
            weight_version=version,
            manifest_digest=self.manifest_digest,
        )

    # ---- weights and control ------------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate, chunks: AsyncIterator[UpdatePart]) -> WeightState:
        """Stage, verify, quiesce and commit on every replica, one update at a time.

        Raises:
            WeightUpdateError: the update was refused. ReplicaUnavailable: no replica could commit it.
        """
        intake = Intake(update, chunks, self._settings.weights, self._settings.ray.namespace)
        async with self._update_lock:
            try:
                await self._router.all("stage", update)
                digest = await stage_all(self._router, intake)
                await self._router.all("verify_stage", digest)
                self._router.weights_will_change(update.version, update.policy)
                await self._router.all("quiesce", update.policy)
                # From here on a sender that leaves changes nothing: half a commit would mix versions.
                return await to_the_end(self._commit_all(update))
            finally:
                await to_the_end(self._router.all_that_can("release"))

    async def _commit_all(self, update: WeightUpdate) -> WeightState:
        self._weights = await commit_all(self._router, update)
        self._router.weights_committed()
        return self._weights

    async def pause(self) -> WeightState:
        """Returns once every replica stands between two steps."""
        # First, so that a replica that comes back meanwhile is paused as well.
        self._paused = True
        await self._router.all("pause")
        return self._weights

    async def resume(self) -> WeightState:
        """Let every replica step again."""
        self._paused = False
        await self._router.all("resume")
        return self._weights

    async def info(self, *, tensor_digests: bool = False) -> ServerInfo:
        """What is served, under which manifest and limits, with each replica's load.

        Raises:
            ReplicaUnavailable: the replicas are still starting.
        """
        info = self._require_info()
        held = await digests_of_all(self._router) if tensor_digests else ()
        loads: list[ReplicaLoad] = await self._router.loads()
        server = self._settings.server
        return ServerInfo(
            model=self._model,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            eos_token_ids=info.eos_token_ids,
            manifest=info.manifest,
            manifest_digest=self.manifest_digest,
            weights=self._weights,
            replicas=tuple(loads),
            paused=self._paused,
            limits={
                "max_n": server.max_n,
                "max_message_bytes": server.max_message_bytes,
                "max_priority": server.max_priority,
                "max_top_logprobs": server.max_top_logprobs,
                "max_images": server.max_images,
                "max_waiting": self._settings.engine.max_waiting,
            },
            tensor_digests=held[0].tensors if held else {},
            replica_digests=held,
        )

    async def stats(self) -> dict[str, EngineStats]:
        """Replica -> counts since its start; replicas that do not answer are left out."""
        outcomes = await self._router.all_outcomes("stats")
        return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, EngineStats)}

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of the text, nothing added.

        Raises:
            UnsupportedFeature: the model has no tokenizer.
        """
        if self._tokenizer is None:
            raise UnsupportedFeature("the model has no tokenizer; send token ids instead of text", field="text")
        return self._tokenizer.encode(text)

    @property
    def manifest_digest(self) -> str:
        """Digest that all replicas share, hex."""
        return manifest_digest(self._require_info().manifest)

    def _require_info(self) -> WorkerInfo:
        if self._info is None:
            raise ReplicaUnavailable("the replicas are still starting")
        return self._info
