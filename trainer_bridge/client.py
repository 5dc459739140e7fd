"""The synchronous client. One channel, safe to share between threads."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

import grpc

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
from rollout.v1 import rollout_pb2_grpc
from trainer_bridge.wire import (
    DEFAULT_BUCKET_BYTES,
    Assembler,
    GenerateResult,
    NamedTensor,
    call_metadata,
    check_scores,
    folder_update,
    plan_update,
    translated,
    update_messages,
)
from trainer_bridge.wire.channel import PLAIN, AuthorizedStub, ClientSecurity, open_channel, rollout_stub
from trainer_bridge.wire.outgoing import Outgoing
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


class RolloutClient:
    """Client of one rollout service. Errors are those of ``rollout.errors``, as the service raised them.

    Args:
        address: "host:port".
        timeout_s: deadline of every call, in seconds.
        max_message_bytes: largest message, both ways.
        client_id: whose fair share the calls count against; "": that of the token, or of this machine's address.
        security: TLS, client certificate, token; None: a plain channel without a token.

    Example:
        with RolloutClient("127.0.0.1:50051") as client:
            result = client.generate([1, 2, 3], SamplingParams(seed=7, max_tokens=32), n=4)
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
        shown = security or PLAIN
        self._channel = open_channel(address, shown, max_message_bytes)
        self._stub = cast(
            "rollout_pb2_grpc.RolloutServiceStub",
            AuthorizedStub(rollout_stub(self._channel), shown),
        )
        self._timeout_s = timeout_s
        self._client_id = client_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; live calls are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: str | Iterable[int],
        sampling: SamplingParams,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """Sample n continuations of a prompt (ids [P], or text) and return them whole; options: ``GenerateOptions``.

        Raises:
            RolloutError: as the service raised it; ParityError when the stream breaks conservation.
        """
        return self._collect(*make_request(prompt, sampling, options))

    def stream(
        self,
        prompt: str | Iterable[int],
        sampling: SamplingParams,
        **options: Unpack[GenerateOptions],
    ) -> Generator[GenerateEvent, None, None]:
        """The events of ``generate`` as they come; closing the iterator cancels the call."""
        request, text = make_request(prompt, sampling, options)
        return self._events(request, text, Assembler(request), _LiveCalls())

    def generate_many(self, requests: Sequence[GenerateRequest], *, concurrency: int = 64) -> list[GenerateResult]:
        """Results in the order of the requests; at most ``concurrency`` at a time. A failure cancels the rest."""
        check_concurrency(concurrency)
        if not requests:
            return []
        calls = _LiveCalls()
        with ThreadPoolExecutor(max_workers=min(concurrency, len(requests))) as threads:
            futures = [threads.submit(self._collect, request, None, calls) for request in requests]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                # Only what had ended by then: the calls cancelled below would hide the cause.
                failed = next((future for future in futures if future in done and future.exception()), None)
                return [failed.result()] if failed else [future.result() for future in futures]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                calls.cancel()
                raise

    def score(
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
            response = self._stub.Score(message, timeout=self._timeout_s, metadata=metadata)
        return check_scores(request, codec.score_result_from_proto(response))

    def update_weights(
        self,
        tensors: Iterable[NamedTensor],
        *,
        version: int,
        digest: str | None = None,
        policy: UpdatePolicy = UpdatePolicy.WAIT,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        allow_nonfinite: bool = False,
    ) -> WeightState:
        """Send a full weight set; every replica serves it when this returns, or none does and it raises.

        Args:
            tensors: (name, numpy array or torch tensor).
            version: must exceed the version being served.
            digest: root digest; computed while the tensors are sent when None.
            policy: what to do with requests in flight.
            bucket_bytes: tensor bytes a message.
            allow_nonfinite: whether NaN and infinity may be served; refused else.
        """
        listed = list(tensors)
        update = plan_update(listed, version=version, digest=digest, policy=policy, allow_nonfinite=allow_nonfinite)
        return self.send_update(update_messages(update, listed, bucket_bytes))

    def update_from_folder(
        self,
        folder: str,
        *,
        root: Path,
        version: int,
        policy: UpdatePolicy = UpdatePolicy.WAIT,
        allow_nonfinite: bool = False,
    ) -> WeightState:
        """Have the server read a weight set from a folder that both see; arguments: ``wire.folder_update``."""
        update = folder_update(folder, root, version=version, policy=policy, allow_nonfinite=allow_nonfinite)
        return self.send_update(iter([codec.update_to_proto(update).SerializeToString()]))

    def send_update(self, messages: Iterator[bytes]) -> WeightState:
        """One update as the serialized messages of its stream."""
        outgoing = Outgoing(messages)
        with outgoing.failures(), translated():
            update: Any = self._stub.UpdateWeights
            response: pb.UpdateWeightsResponse = update(outgoing.stream(), timeout=self._timeout_s)
        return codec.weights_from_proto(response.weights)

    def abort(self, request_id: str = "", *, all_requests: bool = False) -> int:
        """End a live request, or all of them; their streams end with ABORTED. Returns how many samples ended."""
        abort_target(request_id, all_requests)
        with translated():
            message = pb.AbortRequest(request_id=request_id, all=all_requests)
            return self._stub.Abort(message, timeout=self._timeout_s).aborted

    def pause(self) -> WeightState:
        """No token is sampled between the return of this and the call of ``resume``."""
        with translated():
            return codec.weights_from_proto(self._stub.Pause(pb.PauseRequest(), timeout=self._timeout_s).weights)

    def resume(self) -> WeightState:
        """Let sampling go on."""
        with translated():
            return codec.weights_from_proto(self._stub.Resume(pb.ResumeRequest(), timeout=self._timeout_s).weights)

    def info(self, *, tensor_digests: bool = False) -> ServerInfo:
        """Model, parity manifest, weights and load; on request also the digest of every tensor being served."""
        request = pb.GetServerInfoRequest(tensor_digests=tensor_digests)
        with translated():
            return codec.info_from_proto(self._stub.GetServerInfo(request, timeout=self._timeout_s))

    def _collect(self, request: GenerateRequest, text: str | None, calls: _LiveCalls | None = None) -> GenerateResult:
        assembler = Assembler(request)
        for _ in self._events(request, text, assembler, calls or _LiveCalls()):
            pass
        return assembler.result()

    def _events(
        self, request: GenerateRequest, text: str | None, assembler: Assembler, calls: _LiveCalls
    ) -> Generator[GenerateEvent, None, None]:
        message = codec.generate_request_to_proto(request, text=text)
        metadata = call_metadata(request.request_id, self._client_id)
        with translated():
            call = self._stub.Generate(message, timeout=self._timeout_s, metadata=metadata)
            calls.add(call)
            try:
                for response in call:
                    event = codec.generate_event_from_proto(response)
                    assembler.add(event)
                    yield event
                assembler.result()
            finally:
                call.cancel()


class _LiveCalls:
    """Calls that one failure must cancel together, those still to be started included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[grpc.RpcContext] = []
        self._cancelled = False

    def add(self, call: grpc.RpcContext) -> None:
        with self._lock:
            self._calls.append(call)
            if self._cancelled:
                call.cancel()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            for call in self._calls:
                call.cancel()
