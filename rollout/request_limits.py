"""What the settings allow a request to ask for."""

from __future__ import annotations

from rollout.config import ServerSettings
from rollout.errors import InvalidRequest
from rollout.spans import BegunSample
from rollout.types import GenerateRequest, SamplingParams, ScoreRequest


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
    if isinstance(request, GenerateRequest) and request.resume is not None:
        _check_resume(request.sampling, request.resume)


def _check_resume(sampling: SamplingParams, begun: BegunSample) -> None:
    """The rest of a sample is drawn as its beginning was, or it is another sample's."""
    if not begun.token_ids:
        return
    if sampling.seed is None and not sampling.greedy:
        raise InvalidRequest(
            "resume without a seed: the rest would be drawn with another than the tokens so far were; send the first "
            "request's seed, which its client chose, or ask anew",
            field="sampling.seed",
        )
    never = set(sampling.barred_token_ids)
    barred = next((i for i, token in enumerate(begun.token_ids) if token in never), None)
    if barred is not None:
        raise InvalidRequest(
            f"resume.tokens[{barred}] = {begun.token_ids[barred]} is barred by sampling.barred_token_ids, so these "
            "parameters did not draw it; send those of the first request",
            field="resume.tokens",
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
