"""Arguments of the clients' calls to records, and the channel's options."""

from __future__ import annotations

from collections.abc import Iterable

from rollout.errors import InvalidRequest
from rollout.types import GenerateRequest, SamplingParams

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_MAX_MESSAGE_BYTES = 256 * 1024 * 1024


def make_request(
    prompt: str | Iterable[int], sampling: SamplingParams, n: int, sample_index: int, request_id: str, row_digests: bool
) -> tuple[GenerateRequest, str | None]:
    """The record and, for a text prompt, its text (the record then has no ids)."""
    text = prompt if isinstance(prompt, str) else None
    request = GenerateRequest(
        request_id=request_id,
        prompt_ids=() if isinstance(prompt, str) else tuple(int(token) for token in prompt),
        sampling=sampling,
        n=n,
        sample_index=sample_index,
        row_digests=row_digests,
    )
    return request, text


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
