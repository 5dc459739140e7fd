"""Arguments of the clients' calls to records, and the channel's options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from rollout.errors import InvalidRequest
from rollout.images import ImageInput
from rollout.types import GenerateRequest, SamplingParams, ScoreRequest, ScoreSequence
from trainer_bridge.ids import integer, token_ids

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_MAY_BE_LEFT = frozenset({"seed", "max_tokens"})
_SAMPLING_COUNTS = _MAY_BE_LEFT | {"top_k"}
_COUNTS = _SAMPLING_COUNTS | {"n", "sample_index", "top_logprobs", "priority"}
"""What must be an integer."""


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
        InvalidRequest: a prompt that is neither text nor integers, a ``sampling`` that is no record, or a number that
            must be an integer and is none.
    """
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest(f"sampling is a {type(sampling).__name__}; build SamplingParams(...)", field="sampling")
    # Python's own integers: numpy's overflow where a key is made of the seed.
    sampling = replace(sampling, **_whole({n: getattr(sampling, n) for n in _SAMPLING_COUNTS}, "sampling."))
    text = prompt if isinstance(prompt, str) else None
    ids = () if isinstance(prompt, str) else token_ids(prompt, "prompt_ids")
    fields: dict[str, Any] = {"request_id": "", **_whole(options)}
    return GenerateRequest(prompt_ids=ids, sampling=sampling, **fields), text


def make_score_request(sequences: Sequence[ScoreSequence], options: ScoreCallOptions) -> ScoreRequest:
    """The record.

    Raises:
        InvalidRequest: something that is no list of ``ScoreSequence``, ids or counts that are no integers.
    """
    if isinstance(sequences, ScoreSequence):
        raise InvalidRequest("sequences is one ScoreSequence; send a list of them", field="sequences")
    checked = []
    for number, one in enumerate(sequences):
        field = f"sequences[{number}]"
        if not isinstance(one, ScoreSequence):
            raise InvalidRequest(f"{field} is a {type(one).__name__}; build ScoreSequence(ids, start)", field=field)
        checked.append(replace(one, token_ids=token_ids(one.token_ids, f"{field}.tokens.ids")))
    fields: dict[str, Any] = {"request_id": "", **_whole(options)}
    return ScoreRequest(sequences=tuple(checked), **fields)


def _whole(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The options, those that count as integers; None stands for what was not given where the record allows it."""
    found = dict(options)
    for name in _COUNTS & found.keys():
        if type(found[name]) is not int and not (found[name] is None and name in _MAY_BE_LEFT):
            found[name] = integer(found[name], f"{prefix}{name}", f"{prefix}{name}")
    return found


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
    if not isinstance(request_id, str):
        raise InvalidRequest(f"abort(request_id={request_id!r}): an id is a string", field="request_id")
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
