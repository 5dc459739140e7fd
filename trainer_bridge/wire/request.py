"""Arguments of the clients' calls to records, and the channel's options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from rollout.errors import InvalidRequest
from rollout.images import ImageInput
from rollout.types import GenerateRequest, SamplingParams, ScoreRequest, ScoreSequence
from trainer_bridge.ids import token_ids

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_MAX_MESSAGE_BYTES = 256 * 1024 * 1024


class GenerateOptions(TypedDict, total=False):
    """Keywords of the clients' ``generate`` and ``stream``: fields of ``GenerateRequest``, with its defaults."""

    n: int
    sample_index: int
    request_id: str
    row_digests: bool
    top_logprobs: int
    prompt_logprobs: bool
    priority: int
    images: tuple[ImageInput, ...]


class ScoreCallOptions(TypedDict, total=False):
    """Keywords of the clients' ``score``: fields of ``ScoreRequest``, with its defaults."""

    temperature: float
    row_digests: bool
    request_id: str
    top_logprobs: int
    priority: int


def make_request(
    prompt: str | Iterable[int], sampling: SamplingParams, options: GenerateOptions
) -> tuple[GenerateRequest, str | None]:
    """The record and, for a text prompt, its text (the record then has no ids).

    Raises:
        InvalidRequest: a prompt that is neither text nor integers, or ``n`` or ``sample_index`` that is no integer.
    """
    text = prompt if isinstance(prompt, str) else None
    ids = () if isinstance(prompt, str) else token_ids(prompt, "prompt_ids")
    fields: dict[str, Any] = {"request_id": "", **options}
    for name in ("n", "sample_index"):
        # The answer is put together by them, so they are needed before the service can judge them.
        if type(fields.get(name, 0)) is not int:
            (fields[name],) = token_ids([fields[name]], name)
    return GenerateRequest(prompt_ids=ids, sampling=sampling, **fields), text


def make_score_request(sequences: Sequence[ScoreSequence], options: ScoreCallOptions) -> ScoreRequest:
    """The record."""
    fields: dict[str, Any] = {"request_id": "", **options}
    return ScoreRequest(sequences=tuple(sequences), **fields)


def check_concurrency(concurrency: int) -> None:
    """Refuse what would make no call ever.

    Raises:
        InvalidRequest: less than 1.
    """
    if concurrency < 1:
        raise InvalidRequest(f"concurrency = {concurrency} must be at least 1", field="concurrency")


def abort_target(request_id: str, all_requests: bool) -> None:
    """Refuse a call that names neither one request nor all of them, or both.

    Raises:
        InvalidRequest: names the way out.
    """
    if bool(request_id) == all_requests:
        raise InvalidRequest(
            f"abort(request_id={request_id!r}, all_requests={all_requests}): name one request or set all_requests",
            field="request_id",
        )


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Both size limits, and keepalive within what the server permits."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
