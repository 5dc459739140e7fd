"""The asyncio client: the methods of ``RolloutClient`` as coroutines. Belongs to the loop it is first used in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import grpc.aio

from rollout import codec
from rollout.codec import GenerateEvent
from rollout.types import (
    GenerateRequest,
    SamplingParams,
    ScoreResult,
    ScoreSequence,
    ServerInfo,
    UpdatePolicy,
    WeightState,
)
from rollout.v1 import rollout_pb2 as pb
from trainer_bridge.together import together
from trainer_bridge.wire import (
    DEFAULT_BUCKET_BYTES,
    Assembler,
    GenerateResult,
    NamedTensors,
    Outgoing,
    call_metadata,
    check_scores,
    folder_update,
    named_tensors,
    plan_update,
    translated,
    update_messages,
)
from trainer_bridge.wire.channel import PLAIN, AuthorizedStub, ClientSecurity, open_aio_channel, rollout_stub
from trainer_bridge.wire.request import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TIMEOUT_S,
    GenerateOptions,
    ScoreCallOptions,
    abort_target,
    check_concurrency,
    make_request,
    make_score_request,
)

if TYPE_CHECKING:
    from rollout.v1.rollout_pb2_grpc import RolloutServiceAsyncStub


class AsyncRolloutClient:
    """Client of one rollout service. Errors are those of ``rollout.errors``, as the service raised them.

    Args:
        address: "host:port".
        timeout_s: deadline of every call, in seconds.
        max_message_bytes: largest message, both ways.
        client_id: whose fair share the calls count against; "": that of the token, or of this machine's address.
        security: TLS, client certificate, token; None: a plain channel without a token.

    Example:
        async with AsyncRolloutClient("127.0.0.1:50051") as client:
            result = await client.generate([1, 2, 3], SamplingParams(seed=7, max_tokens=32), n=4)
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        client_id: str = "",
        security: ClientSecurity | None = None,
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._client_id = client_id
        self._max_message_bytes = max_message_bytes
        self._security = security or PLAIN
        self._channel: grpc.aio.Channel | None = None
        self._connected: RolloutServiceAsyncStub | None = None

    @property
    def _stub(self) -> RolloutServiceAsyncStub:
        # Not in __init__: a channel belongs to the running loop, and a client may be made outside of one.
        if self._connected is None:
            self._channel = open_aio_channel(self._address, self._security, self._max_message_bytes)
            stub = AuthorizedStub(rollout_stub(self._channel), self._security)
            self._connected = cast("RolloutServiceAsyncStub", stub)
        return self._connected

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; live calls are cancelled."""
        if self._channel is not None:
            await self._channel.close()

    async def generate(
        self,
        prompt: str | Iterable[int],
        sampling: SamplingParams,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """Sample n continuations of a prompt (ids [P], or text) and return them whole; options: ``GenerateOptions``.

        Raises:
            RolloutError: as the service raised it; ParityError when the stream breaks conservation.
        """
        return await self._collect(*make_request(prompt, sampling, options))

    def stream(
        self,
        prompt: str | Iterable[int],
        sampling: SamplingParams,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[GenerateEvent, None]:
        """The events of ``generate`` as they come; closing the iterator cancels the call."""
        request, text = make_request(prompt, sampling, options)
        return self._events(request, text, Assembler(request))

    def events(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """``stream`` of a request as a record, which may ask for the rest of a begun sample (``resume``)."""
        return self._events(request, None, Assembler(request))

    async def generate_many(
        self, requests: Sequence[GenerateRequest], *, concurrency: int = 64
    ) -> list[GenerateResult]:
        """Results in the order of the requests; at most ``concurrency`` at a time. A failure cancels the rest."""
        check_concurrency(concurrency)
        slots = asyncio.Semaphore(concurrency)

        async def one(request: GenerateRequest) -> GenerateResult:
            async with slots:
                return await self._collect(request, None)

        return await together(one(request) for request in requests)

    async def score(
        self,
        sequences: Sequence[ScoreSequence],
        **options: Unpack[ScoreCallOptions],
    ) -> ScoreResult:
        """Log-probs of given tokens by one prefill through the rollout kernels; options: ``ScoreCallOptions``.

        Raises:
            RolloutError: as the service raised it; ParityError when the answer does not match the request.
        """
        request = make_score_request(sequences, options)
        message = codec.score_request_to_proto(request)
        metadata = call_metadata(request.request_id, self._client_id)
        with translated():
            response = await self._stub.Score(message, timeout=self._timeout_s, metadata=metadata)
        return check_scores(request, codec.score_result_from_proto(response))

    async def update_weights(
        self,
        tensors: NamedTensors,
        *,
        version: int,
        digest: str | None = None,
        policy: UpdatePolicy = UpdatePolicy.WAIT,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        allow_nonfinite: bool = False,
    ) -> WeightState:
        """Send a full weight set; every replica serves it when this returns, or none does and it raises.

        Args:
            tensors: pairs of name and numpy array or torch tensor, or a mapping.
            version: must exceed the version being served.
            digest: root digest; computed while the tensors are sent when None.
            policy: what to do with requests in flight.
            bucket_bytes: tensor bytes a message.
            allow_nonfinite: whether NaN and infinity may be served; refused else.
        """
        listed = named_tensors(tensors)
        update = plan_update(listed, version=version, digest=digest, policy=policy, allow_nonfinite=allow_nonfinite)
        return await self._send_update(update_messages(update, listed, bucket_bytes))

    async def update_from_folder(
        self,
        folder: str,
        *,
        root: Path,
        version: int,
        policy: UpdatePolicy = UpdatePolicy.WAIT,
        allow_nonfinite: bool = False,
    ) -> WeightState:
        """Have the server read a weight set from a folder that both see; arguments: ``wire.folder_update``."""
        update = await asyncio.to_thread(
            folder_update, folder, root, version=version, policy=policy, allow_nonfinite=allow_nonfinite
        )
        return await self._send_update(iter([codec.update_to_proto(update).SerializeToString()]))

    async def _send_update(self, messages: Iterator[bytes]) -> WeightState:
        outgoing = Outgoing(messages)
        with outgoing.sent(), translated():
            update: Any = self._stub.UpdateWeights
            response: pb.UpdateWeightsResponse = await update(outgoing, timeout=self._timeout_s)
        return codec.weights_from_proto(response.weights)

    async def abort(self, request_id: str = "", *, all_requests: bool = False) -> int:
        """End a live request, or all of them; their streams end with ABORTED. Returns how many samples ended."""
        abort_target(request_id, all_requests)
        message = pb.AbortRequest(request_id=request_id, all=all_requests)
        with translated():
            return (await self._stub.Abort(message, timeout=self._timeout_s)).aborted

    async def pause(self) -> WeightState:
        """No token is sampled between the return of this and the call of ``resume``."""
        with translated():
            response = await self._stub.Pause(pb.PauseRequest(), timeout=self._timeout_s)
        return codec.weights_from_proto(response.weights)

    async def resume(self) -> WeightState:
        """Let sampling go on."""
        with translated():
            response = await self._stub.Resume(pb.ResumeRequest(), timeout=self._timeout_s)
        return codec.weights_from_proto(response.weights)

    async def info(self, *, tensor_digests: bool = False) -> ServerInfo:
        """Model, parity manifest, weights and load; on request also the digest of every tensor being served."""
        request = pb.GetServerInfoRequest(tensor_digests=tensor_digests)
        with translated():
            response = await self._stub.GetServerInfo(request, timeout=self._timeout_s)
        return codec.info_from_proto(response)

    async def _collect(self, request: GenerateRequest, text: str | None) -> GenerateResult:
        assembler = Assembler(request)
        async with aclosing(self._events(request, text, assembler)) as events:
            async for _ in events:
                pass
        return assembler.result()

    async def _events(
        self, request: GenerateRequest, text: str | None, assembler: Assembler
    ) -> AsyncGenerator[GenerateEvent, None]:
        message = codec.generate_request_to_proto(request, text=text)
        metadata = call_metadata(request.request_id, self._client_id)
        with translated():
            call = self._stub.Generate(message, timeout=self._timeout_s, metadata=metadata)
            try:
                async for response in call:
                    event = codec.generate_event_from_proto(response)
                    assembler.add(event)
                    yield event
                assembler.result()
            finally:
                call.cancel()
