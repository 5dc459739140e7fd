"""A ``rollout.backend.Backend`` without a model: tokens and log-probs are hashes of what they depend on.

Deterministic like the real one: a token depends on seed, sample index and position, its log-prob on position, token and
weight version; so generating and scoring agree, and any mix-up of requests shows in the bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace

import numpy as np

from rollout.codec import GenerateEvent
from rollout.errors import InvalidRequest, NotFound, UnsupportedFeature, WeightUpdateError
from rollout.types import (
    Completion,
    FinishDetail,
    FinishReason,
    Float32Array,
    GenerateRequest,
    PromptChunk,
    ReplicaLoad,
    SampleSummary,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    ScoreSequence,
    SequenceScore,
    ServerInfo,
    TokenChunk,
    TopLogprobs,
    UInt64Array,
    UpdateEnd,
    UpdatePart,
    VersionSpan,
    WeightState,
    WeightUpdate,
)

EOS = 2
DRAWN_SEED = 12345
MANIFEST = {"kernels.attention": "fake", "model.dtype": "float32"}
MANIFEST_DIGEST = "fa4e"


def token_at(seed: int, sample_index: int, position: int, vocab_size: int) -> int:
    """The token that the fake samples; never EOS."""
    token = (seed * 31 + sample_index * 17 + position * 7) % (vocab_size - 3)
    return token + 3


def logprobs_of(ids: list[int], first: int, version: int) -> Float32Array:
    """[l] of ids at absolute positions first, first + 1, ..."""
    positions = np.arange(first, first + len(ids), dtype=np.float32)
    return (-np.log1p(np.asarray(ids, np.float32) + positions * np.float32(0.37) + np.float32(version))).astype(
        np.float32
    )


def digests_of(ids: list[int], first: int) -> UInt64Array:
    """[l]"""
    positions = np.arange(first, first + len(ids)).astype(np.uint64)
    return np.asarray(ids, np.uint64) * np.uint64(2**40 + 1) + positions


def top_of(count: int, n: int, first: int) -> TopLogprobs | None:
    """[count, n], or None for n = 0."""
    if not n:
        return None
    ids = np.arange(first, first + count, dtype=np.int32)[:, None] + np.arange(n, dtype=np.int32)
    return TopLogprobs(ids, -ids.astype(np.float32))


@dataclass
class FakeBackend:
    """What it does is set by its fields; what was done to it can be read off them."""

    vocab_size: int = 64
    context_length: int = 256
    chunk_tokens: int = 4
    tokenizer: bool = True
    text: str | None = "sampled"
    """``SampleSummary.text``"""
    finish: FinishDetail | None = None
    """How samples end; None: LENGTH by max_tokens."""
    ends_with: tuple[int, ...] = ()
    """Last token of sample i is ends_with[i], when given."""
    error: Exception | None = None
    """Raised by every call once it is under way."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Streams pass it after their first chunk; Score before it answers. Open unless ``hold`` was called."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a call waits at the gate."""
    closed: list[str] = field(default_factory=list)
    """Ids of streams that were closed before their end, and of scores that were cancelled."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever ``closed`` grows."""
    live: set[str] = field(default_factory=set)
    seen: list[GenerateRequest | ScoreRequest] = field(default_factory=list)
    received: dict[str, bytearray] = field(default_factory=dict)
    """Tensor bytes of the last update."""
    messages: list[int] = field(default_factory=list)
    """Bytes of each chunk of the last update."""
    weights: WeightState = field(default_factory=lambda: WeightState(1, "01"))
    paused: bool = False
    aborted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate.set()

    def hold(self) -> None:
        """Close the gate."""
        self.gate.clear()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Chunks round robin over the samples, then the ends, then the completion."""
        self._check_ids(request.prompt_ids, "prompt")
        self.seen.append(request)
        self.live.add(request.request_id)
        finished = False
        try:
            async for event in self._events(request):
                yield event
            finished = True
        finally:
            self.live.discard(request.request_id)
            self.aborted.discard(request.request_id)
            if not finished:
                self.closed.append(request.request_id)
                self.ended.set()

    async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        sampling = self._effective(request)
        total = sampling.max_tokens or 0
        done = 0
        indices = range(request.sample_index, request.sample_index + request.n)
        ids = list(request.prompt_ids[1:])
        if request.prompt_logprobs and ids:
            yield PromptChunk(
                start=1,
                logprobs=logprobs_of(ids, 1, self.weights.version),
                weight_version=self.weights.version,
                row_digests=digests_of(ids, 1) if request.row_digests else None,
                top=top_of(len(ids), request.top_logprobs, 1),
            )
        while done < total and request.request_id not in self.aborted:
            step = min(self.chunk_tokens, total - done)
            for index in indices:
                yield self._chunk(request, sampling, index, done, step)
            done += step
            self.reached.set()
            await self.gate.wait()
            if self.error is not None:
                raise self.error
        finish = self.finish or FinishDetail(FinishReason.LENGTH, limit="max_tokens")
        if request.request_id in self.aborted:
            finish = FinishDetail(FinishReason.ABORTED, message="Abort was called")
        spans = (VersionSpan(self.weights.version, 0, done),) if done else ()
        ends = tuple(SampleSummary(index, done, finish, spans, self.text, replica="fake-0") for index in indices)
        for end in ends:
            yield end
        yield Completion(request.request_id, request.prompt_ids, sampling, ends, MANIFEST_DIGEST)

    def _effective(self, request: GenerateRequest) -> SamplingParams:
        sampling = request.sampling
        room = self.context_length - len(request.prompt_ids)
        if room < 1:
            raise InvalidRequest(
                f"prompt has {len(request.prompt_ids)} tokens; the context holds {self.context_length}", field="prompt"
            )
        return replace(
            sampling,
            seed=DRAWN_SEED if sampling.seed is None else sampling.seed,
            max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        )

    def _chunk(
        self, request: GenerateRequest, sampling: SamplingParams, index: int, offset: int, count: int
    ) -> TokenChunk:
        first = len(request.prompt_ids) + offset
        seed = sampling.seed or 0
        ids = [token_at(seed, index, first + i, self.vocab_size) for i in range(count)]
        if self.ends_with and offset + count == sampling.max_tokens:
            ids[-1] = self.ends_with[index - request.sample_index]
        logprobs = logprobs_of(ids, first, self.weights.version)
        return TokenChunk(
            sample_index=index,
            offset=offset,
            token_ids=np.asarray(ids, np.int32),
            policy_logprobs=logprobs,
            behavior_logprobs=logprobs.copy(),
            weight_version=self.weights.version,
            row_digests=digests_of(ids, first) if request.row_digests else None,
            top=top_of(count, request.top_logprobs, first),
        )

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """The log-probs that generate would have given."""
        for sequence in request.sequences:
            self._check_ids(sequence.token_ids, "sequences")
        self.seen.append(request)
        try:
            self.reached.set()
            await self.gate.wait()
        except asyncio.CancelledError:
            self.closed.append(request.request_id)
            self.ended.set()
            raise
        if self.error is not None:
            raise self.error
        return ScoreResult(
            request_id=request.request_id,
            scores=tuple(self._score(sequence, request) for sequence in request.sequences),
            temperature=request.temperature,
            mode=SamplingParams(temperature=request.temperature).logprob_mode,
            weight_version=self.weights.version,
            manifest_digest=MANIFEST_DIGEST,
        )

    def _score(self, sequence: ScoreSequence, request: ScoreRequest) -> SequenceScore:
        ids = list(sequence.token_ids[sequence.start :])
        return SequenceScore(
            logprobs=logprobs_of(ids, sequence.start, self.weights.version),
            row_digests=digests_of(ids, sequence.start) if request.row_digests else None,
            top=top_of(len(ids), request.top_logprobs, sequence.start),
        )

    def _check_ids(self, ids: tuple[int, ...], name: str) -> None:
        if max(ids) >= self.vocab_size:
            raise InvalidRequest(f"{name} has id {max(ids)}; vocab_size is {self.vocab_size}", field=name)

    async def update_weights(self, update: WeightUpdate, chunks: AsyncIterator[UpdatePart]) -> WeightState:
        """Stage every byte; commit when ``num_tensors`` tensors came whole."""
        staged: dict[str, bytearray] = {}
        sizes: list[int] = []
        digest = update.digest
        async for chunk in chunks:
            if isinstance(chunk, UpdateEnd):
                digest = chunk.digest
                continue
            staged.setdefault(chunk.name, bytearray()).extend(chunk.data)
            sizes.append(len(chunk.data))
        if self.error is not None:
            raise self.error
        if len(staged) != update.num_tensors:
            raise WeightUpdateError(f"{len(staged)} tensors came, {update.num_tensors} were announced; send all")
        self.received, self.messages = staged, sizes
        self.weights = WeightState(update.version, digest)
        return self.weights

    async def abort(self, request_id: str) -> int:
        """End a stream at its next step."""
        targets = self.live if not request_id else self.live & {request_id}
        if request_id and not targets:
            raise NotFound(f"no live request {request_id!r}", field="request_id")
        self.aborted |= targets
        self.gate.set()
        return len(targets)

    async def pause(self) -> WeightState:
        """Only noted."""
        self.paused = True
        return self.weights

    async def resume(self) -> WeightState:
        """Only noted."""
        self.paused = False
        return self.weights

    async def info(self, *, tensor_digests: bool = False) -> ServerInfo:
        """One replica."""
        if self.error is not None:
            raise self.error
        replica = ReplicaLoad("fake-0", True, len(self.live), 0, 7, 8, self.weights)
        return ServerInfo(
            model="fake",
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            eos_token_ids=(EOS,),
            manifest=MANIFEST,
            manifest_digest=MANIFEST_DIGEST,
            weights=self.weights,
            replicas=(replica,),
            paused=self.paused,
            limits={"max_n": 8},
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """One id a byte."""
        if not self.tokenizer:
            raise UnsupportedFeature("the fake has no tokenizer; send token ids", field="prompt.text")
        return tuple(byte % self.vocab_size for byte in text.strip().encode())
