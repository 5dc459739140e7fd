"""``rollout.v1.RolloutService`` over a ``Backend``: decode, call, encode; errors are left to the interceptors."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from rollout import codec
from rollout.backend import Backend
from rollout.call_scope import Role, current_scope, note, require
from rollout.config import ServerSettings
from rollout.errors import DuplicateRequest, NotFound, RequestAborted, RolloutError
from rollout.interceptors import client_of
from rollout.message_limits import ASIDE_BYTES, check_generate, check_name, check_score
from rollout.types import Completion, GenerateRequest, TensorChunk, UpdateEnd
from rollout.v1 import rollout_pb2 as pb
from rollout.v1 import rollout_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
_DRAIN_BYTES = 1 << 30
_DRAIN_IDLE_S = 0.5


@dataclass(slots=True)
class _LiveCall:
    task: asyncio.Task[Any]
    client: str
    sequences: int = 0
    """of a Score; a Generate's samples are the backend's to end"""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cause: str = ""
    """why the service itself cancelled it; "": it did not"""


class RolloutService(rollout_pb2_grpc.RolloutServiceServicer):
    """One servicer a server. Its only state is which request ids are live.

    Args:
        backend: what answers.
        split_bytes: chunks of a stream that hold more tensor bytes go in several messages.
        limits: what a request may hold, and whether prompts are logged.
    """

    def __init__(
        self, backend: Backend, *, split_bytes: int = codec.SPLIT_BYTES, limits: ServerSettings | None = None
    ) -> None:
        self._backend = backend
        self._split_bytes = split_bytes
        self._limits = limits or ServerSettings()
        self._live: dict[str, _LiveCall] = {}

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Stream the backend's events; however the call ends, the backend's iterator is closed before it does."""
        check_generate(request, self._limits)
        codec.refuse_unknown_fields(request)
        decoded = await _aside(request, lambda: codec.generate_request_from_proto(request, encode=self._backend.encode))
        client = client_of(context)
        async with self._named(decoded.request_id, client, take_over=decoded.resume is not None) as request_id:
            self._note(request, replace(decoded, request_id=request_id))
            events = self._backend.generate(replace(decoded, request_id=request_id, client=client))
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Completion):
                        note(tokens=sum(sample.num_tokens for sample in event.samples))
                    for part in codec.split_event(event, self._split_bytes):
                        yield codec.generate_event_to_proto(part)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Score by prefill; grpc.aio cancels this task, and so the backend's call, when the client goes."""
        check_score(request, self._limits)
        codec.refuse_unknown_fields(request)
        decoded = await _aside(request, lambda: codec.score_request_from_proto(request))
        client = client_of(context)
        count = len(decoded.sequences)
        async with self._named(decoded.request_id, client, sequences=count) as request_id:
            note(request_id=request_id, sequences=count)
            result = await self._backend.score(replace(decoded, request_id=request_id, client=client))
        return codec.score_result_to_proto(result)

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[codec.UpdateMessage], context: Context
    ) -> pb.UpdateWeightsResponse:
        """Hand the backend a checked head and a stream of chunks; a bad chunk raises inside its iteration."""
        try:
            update = codec.head_from_wire(await anext(aiter(request_iterator), pb.UpdateWeightsRequest()))
            note(version=update.version, digest=update.digest, tensors=update.num_tensors, policy=update.policy.value)
            async with aclosing(_chunks(request_iterator)) as chunks:
                state = await self._backend.update_weights(update, chunks)
        except RolloutError:
            await _drain(request_iterator)
            raise
        return pb.UpdateWeightsResponse(weights=codec.weights_to_proto(state))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Model, manifest, weights, load."""
        codec.refuse_unknown_fields(request)
        if request.tensor_digests:
            # Reads all weights, on the engine's thread.
            require(Role.CONTROL, "tensor_digests")
        return codec.info_to_proto(await self._backend.info(tensor_digests=request.tensor_digests))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End live samples, whose streams end normally, and live Score calls, which have no answer but ABORTED."""
        codec.refuse_unknown_fields(request)
        check_name(request.request_id)
        wanted = codec.abort_from_proto(request)
        if wanted:
            self._check_owner(wanted, client_of(context))
            note(request_id=wanted)
        else:
            note(all=True, control=True)
            require(Role.CONTROL, "Abort of all requests")
        scores = self._end_scores(wanted)
        aborted = scores if wanted and scores else scores + await self._backend.abort(wanted)
        note(aborted=aborted)
        return pb.AbortResponse(aborted=aborted)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        """Stop sampling."""
        codec.refuse_unknown_fields(request)
        return pb.PauseResponse(weights=codec.weights_to_proto(await self._backend.pause()))

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """Go on sampling."""
        codec.refuse_unknown_fields(request)
        return pb.ResumeResponse(weights=codec.weights_to_proto(await self._backend.resume()))

    def _end_scores(self, wanted: str) -> int:
        """End one Score call, or all of them for ""; how many sequences they had."""
        chosen = {name: call for name, call in self._live.items() if call.sequences and wanted in ("", name)}
        for name, call in chosen.items():
            if not call.task.cancelling():
                call.cause = f"request_id = {name!r} was aborted by the client"
                call.task.cancel()
        return sum(call.sequences for call in chosen.values())

    def _note(self, request: pb.GenerateRequest, decoded: GenerateRequest) -> None:
        note(request_id=decoded.request_id, prompt_tokens=len(decoded.prompt_ids), n=decoded.n)
        if self._limits.log_prompts:
            note(prompt=request.text or list(decoded.prompt_ids))

    def _check_owner(self, request_id: str, client: str) -> None:
        """A caller without the role control ends its own requests only; those of others are as if they were not."""
        scope, live = current_scope(), self._live.get(request_id)
        if scope is None or scope.caller.may(Role.CONTROL) or (live is not None and live.client == client):
            return
        raise NotFound(f"no live request {request_id!r}", field="request_id")

    @asynccontextmanager
    async def _named(
        self, request_id: str, client: str, *, take_over: bool = False, sequences: int = 0
    ) -> AsyncIterator[str]:
        """Hold the name for the length of the call, or a new one for an empty name.

        With ``take_over`` a live call of that name ends first: its client says that it lost the stream. A name whose
        call the client has already left is not live: its owner may use it again, once the cleanup is done.
        """
        name = request_id or secrets.token_hex(16)
        while (holder := self._live.get(name)) is not None:
            # grpc.aio cancels the task when the client goes; the context does not tell before the call has ended.
            if take_over and holder.client == client and not holder.task.cancelling():
                holder.cause = f"request_id = {name!r} was taken over by a call that resumes it"
                holder.task.cancel()
            elif not holder.task.cancelling():
                raise DuplicateRequest(
                    f"request_id = {name!r} belongs to a live request; wait for its end, abort it, or use another id",
                    field="request_id",
                )
            await holder.ended.wait()
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        call = self._live[name] = _LiveCall(task, client, sequences)
        try:
            yield name
        except asyncio.CancelledError:
            if not call.cause:
                raise
            # A cancelled handler leaves its client without a status.
            task.uncancel()
            raise RequestAborted(call.cause) from None
        finally:
            del self._live[name]
            call.ended.set()


async def _aside(message: Message, decode: Callable[[], T]) -> T:
    """The decoded record; of large messages on another thread, so that other calls go on meanwhile."""
    return await asyncio.to_thread(decode) if message.ByteSize() > ASIDE_BYTES else decode()


async def _drain(messages: AsyncIterator[codec.UpdateMessage]) -> None:
    """Read on, within limits, before a refusal: a sender that writes to an ended call sees grpc.aio's own
    "Internal error from Core" in place of the reason."""
    rest = aiter(messages)
    size = 0
    with suppress(TimeoutError, StopAsyncIteration):
        while size < _DRAIN_BYTES:
            async with asyncio.timeout(_DRAIN_IDLE_S):
                size += codec.message_bytes(await anext(rest))


async def _chunks(messages: AsyncIterator[codec.UpdateMessage]) -> AsyncGenerator[TensorChunk | UpdateEnd, None]:
    async for message in messages:
        part = codec.part_from_wire(message)
        if isinstance(part, UpdateEnd):
            yield part
            continue
        for chunk in part:
            yield chunk
