"""Score: request and response."""

from __future__ import annotations

import numpy as np

from rollout.codec.fields import assign, check_count, check_temperature, extend, malformed, token_ids
from rollout.codec.image import add_images, images_from_proto
from rollout.codec.sampling import mode_from_proto, mode_to_proto
from rollout.codec.tensor import tensor_to_proto, vector_from_proto
from rollout.codec.top import check_rows, top_from_proto, top_to_proto
from rollout.errors import InvalidRequest
from rollout.types import ScoreRequest, ScoreResult, ScoreSequence, SequenceScore
from rollout.v1 import rollout_pb2 as pb


def score_request_to_proto(request: ScoreRequest) -> pb.ScoreRequest:
    """The request on the wire.

    Raises:
        InvalidRequest: a value does not fit its wire type.
    """
    message = pb.ScoreRequest()
    assign(
        message,
        request_id=request.request_id,
        temperature=request.temperature,
        row_digests=request.row_digests,
        top_logprobs=request.top_logprobs,
        priority=request.priority,
    )
    for index, sequence in enumerate(request.sequences):
        item = message.sequences.add()
        assign(item, f"sequences[{index}].", start=sequence.start)
        extend(item.tokens.ids, sequence.token_ids, f"sequences[{index}].tokens.ids")
        add_images(item.images, sequence.images)
    return message


def score_request_from_proto(message: pb.ScoreRequest) -> ScoreRequest:
    """A request whose structure is sound; an empty ``request_id`` is left for the service to fill.

    Raises:
        InvalidRequest: no sequence, fewer than two ids, ids outside [0, 2^31), a start outside [1, S), or a temperature
            that is negative or not finite.
    """
    if not message.sequences:
        raise InvalidRequest("sequences is empty; send at least one", field="sequences")
    temperature = message.temperature if message.HasField("temperature") else 1.0
    return ScoreRequest(
        request_id=message.request_id,
        sequences=tuple(_sequence_from_proto(item, f"sequences[{i}]") for i, item in enumerate(message.sequences)),
        temperature=check_temperature(temperature, "temperature"),
        row_digests=message.row_digests if message.HasField("row_digests") else False,
        top_logprobs=check_count(message.top_logprobs if message.HasField("top_logprobs") else 0, "top_logprobs"),
        priority=message.priority if message.HasField("priority") else 0,
    )


def _sequence_from_proto(message: pb.ScoreSequence, field: str) -> ScoreSequence:
    ids = token_ids(message.tokens, f"{field}.tokens.ids")
    start = message.start if message.HasField("start") else 1
    if len(ids) < 2:
        raise InvalidRequest(
            f"{field} has {len(ids)} id; at least 2 are needed, as position 0 has no log-prob",
            field=f"{field}.tokens.ids",
        )
    if not 1 <= start < len(ids):
        raise InvalidRequest(
            f"{field}.start = {start} must lie in [1, {len(ids)}): position 0 has no log-prob", field=f"{field}.start"
        )
    return ScoreSequence(token_ids=ids, start=start, images=images_from_proto(message.images, f"{field}."))


def score_result_to_proto(result: ScoreResult) -> pb.ScoreResponse:
    """The response on the wire.

    Raises:
        RolloutError: a score whose log-probs and digests differ in number or dtype.
    """
    return pb.ScoreResponse(
        request_id=result.request_id,
        scores=[_score_to_proto(_check_score(score)) for score in result.scores],
        temperature=result.temperature,
        logprob_mode=mode_to_proto(result.mode),
        weight_version=result.weight_version,
        manifest_digest=result.manifest_digest,
    )


def score_result_from_proto(message: pb.ScoreResponse) -> ScoreResult:
    """The result, its invariants checked again on this side.

    Raises:
        RolloutError: the message breaks the protocol.
    """
    mode = mode_from_proto(message.logprob_mode)
    if mode is None:
        raise malformed(f"logprob_mode {message.logprob_mode} is unset or unknown", "logprob_mode")
    return ScoreResult(
        request_id=message.request_id,
        scores=tuple(_score_from_proto(item, f"scores[{i}]") for i, item in enumerate(message.scores)),
        temperature=message.temperature,
        mode=mode,
        weight_version=message.weight_version,
        manifest_digest=message.manifest_digest,
    )


def _check_score(score: SequenceScore) -> SequenceScore:
    check_rows(score, "scores")
    return score


def _score_to_proto(score: SequenceScore) -> pb.SequenceScore:
    return pb.SequenceScore(
        logprobs=tensor_to_proto(score.logprobs),
        row_digests=None if score.row_digests is None else tensor_to_proto(score.row_digests),
        top=top_to_proto(score.top),
    )


def _score_from_proto(message: pb.SequenceScore, field: str) -> SequenceScore:
    digests = message.row_digests if message.HasField("row_digests") else None
    return _check_score(
        SequenceScore(
            logprobs=vector_from_proto(message.logprobs, np.float32, f"{field}.logprobs"),
            row_digests=None if digests is None else vector_from_proto(digests, np.uint64, f"{field}.row_digests"),
            top=top_from_proto(message.top, f"{field}.top") if message.HasField("top") else None,
        )
    )
