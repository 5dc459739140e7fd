"""Limits that are looked at in a message before anything is made of it."""

from __future__ import annotations

from rollout.errors import InvalidRequest
from rollout.server_settings import RequestLimits
from rollout.v1 import rollout_pb2 as pb

MAX_REQUEST_ID_BYTES = 512
ASIDE_BYTES = 8192
"""Larger requests are decoded, and their text tokenized, on another thread."""


def check_generate(message: pb.GenerateRequest, limits: RequestLimits) -> None:
    """Refuse a request that asks for more than the settings allow.

    Raises:
        InvalidRequest: names the value, the limit and the setting.
    """
    check_name(message.request_id)
    _most(len(message.tokens.ids), limits.max_prompt_tokens, "prompt", "token ids", "max_prompt_tokens")
    _most(len(message.text.encode()), limits.max_prompt_bytes, "prompt", "bytes", "max_prompt_bytes")
    asked = message.sampling
    _most(len(asked.stop), limits.max_stop_strings, "sampling.stop", "stop strings", "max_stop_strings")
    for text in asked.stop:
        _most(len(text.encode()), limits.max_stop_bytes, "sampling.stop", "bytes in one string", "max_stop_bytes")
    _most(len(asked.stop_token_ids), limits.max_listed_ids, "sampling.stop_token_ids", "ids", "max_listed_ids")
    _most(len(asked.barred_token_ids), limits.max_listed_ids, "sampling.barred_token_ids", "ids", "max_listed_ids")


def check_score(message: pb.ScoreRequest, limits: RequestLimits) -> None:
    """The same for sequences to score."""
    check_name(message.request_id)
    _most(len(message.sequences), limits.max_sequences, "sequences", "sequences", "max_sequences")
    for index, sequence in enumerate(message.sequences):
        field = f"sequences[{index}].tokens.ids"
        _most(len(sequence.tokens.ids), limits.max_prompt_tokens, field, "token ids", "max_prompt_tokens")


def check_name(request_id: str) -> None:
    """Refuse names that would burden every log line."""
    size = len(request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise InvalidRequest(
            f"request_id has {size} bytes, the limit is {MAX_REQUEST_ID_BYTES}; use a shorter name", field="request_id"
        )


def _most(size: int, most: int, field: str, what: str, setting: str) -> None:
    if size > most:
        raise InvalidRequest(
            f"{field} holds {size} {what}, the limit is {most} (server.{setting}); send less, or raise the setting",
            field=field,
        )
