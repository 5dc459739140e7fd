"""Generate: the request and the four events of its stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollout.codec.fields import MAX_TOKEN_ID, assign, check_count, check_token_ids, extend, malformed, token_ids
from rollout.codec.image import add_images, images_from_proto
from rollout.codec.sampling import (
    mode_from_proto,
    mode_to_proto,
    requested_sampling,
    sampling_from_proto,
    sampling_to_proto,
)
from rollout.codec.tensor import check_vector, tensor_to_proto, vector_from_proto
from rollout.codec.top import check_rows, check_top, top_from_proto, top_to_proto
from rollout.errors import InvalidRequest
from rollout.spans import BegunSample
from rollout.types import (
    Completion,
    FinishDetail,
    FinishReason,
    GenerateRequest,
    PromptChunk,
    SampleSummary,
    TokenChunk,
    VersionSpan,
)
from rollout.v1 import rollout_pb2 as pb

GenerateEvent = PromptChunk | TokenChunk | SampleSummary | Completion

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
}


def generate_request_to_proto(request: GenerateRequest, *, text: str | None = None) -> pb.GenerateRequest:
    """The request on the wire. With ``text`` the prompt is that text and ``request.prompt_ids`` must be empty.

    Raises:
        InvalidRequest: a value does not fit its wire type, or both kinds of prompt are given.
    """
    message = pb.GenerateRequest(sampling=sampling_to_proto(request.sampling))
    assign(
        message,
        request_id=request.request_id,
        n=request.n,
        sample_index=request.sample_index,
        row_digests=request.row_digests,
        priority=request.priority,
        top_logprobs=request.top_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        text=text,
    )
    if request.resume is not None:
        message.resume.tokens.SetInParent()
        extend(message.resume.tokens.ids, request.resume.token_ids, "resume.tokens")
        message.resume.spans.extend(
            pb.VersionSpan(version=s.version, start=s.start, end=s.end) for s in request.resume.spans
        )
    if text is None:
        message.tokens.SetInParent()
        extend(message.tokens.ids, request.prompt_ids, "prompt")
    elif request.prompt_ids:
        raise InvalidRequest(f"prompt has both a text and {len(request.prompt_ids)} ids; give one", field="prompt")
    add_images(message.images, request.images)
    return message


def generate_request_from_proto(
    message: pb.GenerateRequest, *, encode: Callable[[str], tuple[int, ...]]
) -> GenerateRequest:
    """A request whose structure is sound; an empty ``request_id`` is left for the service to fill.

    Args:
        message: as received.
        encode: turns a text prompt into ids [P] (``Backend.encode``).

    Raises:
        InvalidRequest: no prompt, an empty one, ids outside [0, 2^31), n < 1, or sampling values out of range.
    """
    n = message.n if message.HasField("n") else 1
    first = message.sample_index if message.HasField("sample_index") else 0
    if n < 1:
        raise InvalidRequest(f"n = {n} must be >= 1", field="n")
    if first < 0 or first + n - 1 > MAX_TOKEN_ID:
        raise InvalidRequest(f"sample_index = {first} with n = {n} must lie in [0, 2^31)", field="sample_index")
    return GenerateRequest(
        request_id=message.request_id,
        prompt_ids=_prompt_ids(message, encode),
        sampling=requested_sampling(message.sampling),
        n=n,
        sample_index=first,
        row_digests=message.row_digests if message.HasField("row_digests") else False,
        priority=message.priority if message.HasField("priority") else 0,
        top_logprobs=check_count(message.top_logprobs if message.HasField("top_logprobs") else 0, "top_logprobs"),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else False,
        images=images_from_proto(message.images),
        resume=_resume(message.resume, n) if message.HasField("resume") else None,
    )


def _resume(message: pb.Resume, n: int) -> BegunSample:
    if n != 1:
        raise InvalidRequest(f"n = {n}: samples are resumed one at a time, by sample_index", field="n")
    tokens = tuple(message.tokens.ids)
    if tokens:
        check_token_ids(tokens, "resume.tokens.ids")
    spans = tuple(VersionSpan(s.version, s.start, s.end) for s in message.spans)
    edges = [0, *(s.end for s in spans)]
    whole = [s.start for s in spans] == edges[:-1] and edges[-1] == len(tokens)
    if not whole or any(s.start >= s.end or s.version < 0 for s in spans):
        raise InvalidRequest(
            f"resume.spans end at {edges[1:]} and do not cover the {len(tokens)} tokens in order",
            field="resume.spans",
        )
    return BegunSample(tokens, spans)


def _prompt_ids(message: pb.GenerateRequest, encode: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
    match message.WhichOneof("prompt"):
        case "tokens":
            return token_ids(message.tokens, "prompt.tokens.ids")
        case "text":
            ids = encode(message.text) if message.text else ()
            if not ids:
                raise InvalidRequest(
                    f"prompt.text = {message.text!r} encodes to no token; send text or ids (the service adds no BOS)",
                    field="prompt.text",
                )
            check_token_ids(ids, "prompt.text")
            return ids
        case _:
            raise InvalidRequest("prompt is not set; send tokens or text", field="prompt")


def generate_event_to_proto(event: GenerateEvent) -> pb.GenerateResponse:
    """One message of the stream.

    Raises:
        RolloutError: the event breaks the invariants of its type (lengths, spans, effective values).
    """
    match event:
        case PromptChunk():
            return pb.GenerateResponse(prompt=_prompt_to_proto(event))
        case TokenChunk():
            return pb.GenerateResponse(chunk=_chunk_to_proto(event))
        case SampleSummary():
            return pb.GenerateResponse(summary=_summary_to_proto(event))
        case Completion():
            return pb.GenerateResponse(completion=_completion_to_proto(event))


def generate_event_from_proto(message: pb.GenerateResponse) -> GenerateEvent:
    """The event, its invariants checked again on this side.

    Raises:
        RolloutError: the message breaks the protocol.
    """
    match message.WhichOneof("event"):
        case "prompt":
            return _prompt_from_proto(message.prompt)
        case "chunk":
            return _chunk_from_proto(message.chunk)
        case "summary":
            return _summary_from_proto(message.summary)
        case "completion":
            return _completion_from_proto(message.completion)
        case _:
            raise malformed("GenerateResponse has no event", "event")


def _check_chunk(chunk: TokenChunk) -> TokenChunk:
    length = chunk.token_ids.shape[0] if chunk.token_ids.ndim == 1 else -1
    check_vector(chunk.token_ids, np.int32, length, "chunk.token_ids")
    check_vector(chunk.policy_logprobs, np.float32, length, "chunk.policy_logprobs")
    check_vector(chunk.behavior_logprobs, np.float32, length, "chunk.behavior_logprobs")
    if chunk.row_digests is not None:
        check_vector(chunk.row_digests, np.uint64, length, "chunk.row_digests")
    check_top(chunk.top, length, "chunk.top")
    if chunk.sample_index < 0 or chunk.offset < 0:
        raise malformed(f"chunk of sample {chunk.sample_index} at offset {chunk.offset}: neither may be negative")
    return chunk


def _chunk_to_proto(chunk: TokenChunk) -> pb.TokenChunk:
    _check_chunk(chunk)
    return pb.TokenChunk(
        sample_index=chunk.sample_index,
        offset=chunk.offset,
        token_ids=tensor_to_proto(chunk.token_ids),
        policy_logprobs=tensor_to_proto(chunk.policy_logprobs),
        behavior_logprobs=tensor_to_proto(chunk.behavior_logprobs),
        row_digests=None if chunk.row_digests is None else tensor_to_proto(chunk.row_digests),
        weight_version=chunk.weight_version,
        top=top_to_proto(chunk.top),
    )


def _chunk_from_proto(message: pb.TokenChunk) -> TokenChunk:
    digests = message.row_digests if message.HasField("row_digests") else None
    return _check_chunk(
        TokenChunk(
            sample_index=message.sample_index,
            offset=message.offset,
            token_ids=vector_from_proto(message.token_ids, np.int32, "chunk.token_ids"),
            policy_logprobs=vector_from_proto(message.policy_logprobs, np.float32, "chunk.policy_logprobs"),
            behavior_logprobs=vector_from_proto(message.behavior_logprobs, np.float32, "chunk.behavior_logprobs"),
            weight_version=message.weight_version,
            row_digests=None if digests is None else vector_from_proto(digests, np.uint64, "chunk.row_digests"),
            top=top_from_proto(message.top, "chunk.top") if message.HasField("top") else None,
        )
    )


def _check_prompt(chunk: PromptChunk) -> PromptChunk:
    check_rows(chunk, "prompt")
    if chunk.start < 1:
        raise malformed(f"prompt log-probs start at {chunk.start}; position 0 has none", "prompt.start")
    return chunk


def _prompt_to_proto(chunk: PromptChunk) -> pb.PromptChunk:
    _check_prompt(chunk)
    return pb.PromptChunk(
        start=chunk.start,
        logprobs=tensor_to_proto(chunk.logprobs),
        row_digests=None if chunk.row_digests is None else tensor_to_proto(chunk.row_digests),
        top=top_to_proto(chunk.top),
        weight_version=chunk.weight_version,
    )


def _prompt_from_proto(message: pb.PromptChunk) -> PromptChunk:
    digests = message.row_digests if message.HasField("row_digests") else None
    return _check_prompt(
        PromptChunk(
            start=message.start,
            logprobs=vector_from_proto(message.logprobs, np.float32, "prompt.logprobs"),
            weight_version=message.weight_version,
            row_digests=None if digests is None else vector_from_proto(digests, np.uint64, "prompt.row_digests"),
            top=top_from_proto(message.top, "prompt.top") if message.HasField("top") else None,
        )
    )


def _check_summary(summary: SampleSummary) -> SampleSummary:
    if summary.sample_index < 0 or summary.num_tokens < 0:
        raise malformed(f"summary of sample {summary.sample_index} with {summary.num_tokens} tokens is negative")
    end = 0
    for span in summary.spans:
        if span.start != end or span.end <= span.start:
            break
        end = span.end
    else:
        if end == summary.num_tokens:
            return summary
    spans = [(span.version, span.start, span.end) for span in summary.spans]
    raise malformed(
        f"spans {spans} of sample {summary.sample_index} do not cover its {summary.num_tokens} tokens once, in order",
        "summary.spans",
    )


def _summary_to_proto(summary: SampleSummary) -> pb.SampleSummary:
    _check_summary(summary)
    finish = summary.finish
    return pb.SampleSummary(
        sample_index=summary.sample_index,
        num_tokens=summary.num_tokens,
        finish_reason=_FINISH[finish.reason],
        stop_token_id=finish.stop_token_id,
        stop_string=finish.stop_string,
        limit=finish.limit,
        message=finish.message,
        spans=[pb.VersionSpan(version=s.version, start=s.start, end=s.end) for s in summary.spans],
        text=summary.text,
        num_cached_tokens=summary.num_cached_tokens,
        replica=summary.replica,
    )


def _summary_from_proto(message: pb.SampleSummary) -> SampleSummary:
    reason = next((reason for reason, known in _FINISH.items() if known == message.finish_reason), None)
    if reason is None:
        raise malformed(
            f"finish_reason {message.finish_reason} of sample {message.sample_index} is unset or unknown",
            "summary.finish_reason",
        )
    return _check_summary(
        SampleSummary(
            sample_index=message.sample_index,
            num_tokens=message.num_tokens,
            finish=FinishDetail(
                reason=reason,
                stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
                stop_string=message.stop_string if message.HasField("stop_string") else None,
                limit=message.limit,
                message=message.message,
            ),
            spans=tuple(VersionSpan(version=s.version, start=s.start, end=s.end) for s in message.spans),
            text=message.text if message.HasField("text") else None,
            num_cached_tokens=message.num_cached_tokens,
            replica=message.replica,
        )
    )


def _check_completion(completion: Completion) -> Completion:
    for name in ("seed", "max_tokens"):
        if getattr(completion.sampling, name) is None:
            raise malformed(
                f"completion of {completion.request_id!r} does not echo {name}", f"completion.sampling.{name}"
            )
    return completion


def _completion_to_proto(completion: Completion) -> pb.Completion:
    _check_completion(completion)
    return pb.Completion(
        request_id=completion.request_id,
        prompt=pb.TokenIds(ids=completion.prompt_ids),
        sampling=sampling_to_proto(completion.sampling),
        logprob_mode=mode_to_proto(completion.sampling.logprob_mode),
        samples=[_summary_to_proto(summary) for summary in completion.samples],
        manifest_digest=completion.manifest_digest,
    )


def _completion_from_proto(message: pb.Completion) -> Completion:
    sampling = sampling_from_proto(message.sampling)
    if mode_from_proto(message.logprob_mode) is not sampling.logprob_mode:
        raise malformed(
            f"logprob_mode {message.logprob_mode} is not that of temperature {sampling.temperature}",
            "completion.logprob_mode",
        )
    return _check_completion(
        Completion(
            request_id=message.request_id,
            prompt_ids=tuple(message.prompt.ids),
            sampling=sampling,
            samples=tuple(_summary_from_proto(summary) for summary in message.samples),
            manifest_digest=message.manifest_digest,
        )
    )
