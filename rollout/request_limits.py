"""What the settings allow a request to ask for."""

from __future__ import annotations

from rollout.config import ServerSettings
from rollout.errors import InvalidRequest
from rollout.types import GenerateRequest, ScoreRequest


def check_limits(request: GenerateRequest | ScoreRequest, server: ServerSettings) -> None:
    """Refuse a priority, a number of alternatives or of images beyond the settings."""
    if abs(request.priority) > server.max_priority:
        raise InvalidRequest(
            f"priority = {request.priority} is outside [-{server.max_priority}, {server.max_priority}] "
            "(server.max_priority)",
            field="priority",
        )
    if not 0 <= request.top_logprobs <= server.max_top_logprobs:
        raise InvalidRequest(
            f"top_logprobs = {request.top_logprobs} is outside [0, {server.max_top_logprobs}] "
            "(server.max_top_logprobs)",
            field="top_logprobs",
        )
    holders = [request] if isinstance(request, GenerateRequest) else request.sequences
    if (most := max((len(h.images) for h in holders), default=0)) > server.max_images:
        raise InvalidRequest(
            f"{most} images in one prompt are more than {server.max_images} (server.max_images)", field="images"
        )


def check_answer_size(request: ScoreRequest, limit: int) -> None:
    """Refuse before the work what could not be sent after it."""
    positions = sum(len(s.token_ids) - s.start for s in request.sequences)
    # Log-prob, digest and alternatives; 128 bytes of heads a sequence.
    size = positions * (4 + 8 * request.row_digests + 8 * request.top_logprobs) + 128 * len(request.sequences)
    if size > limit:
        raise InvalidRequest(
            f"{positions} positions with {request.top_logprobs} alternatives each answer with {size} bytes, a "
            f"message holds {limit} (server.max_message_bytes); score fewer sequences a call or ask for fewer "
            "alternatives",
            field="sequences",
        )
