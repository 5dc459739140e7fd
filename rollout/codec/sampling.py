"""SamplingParams. An unset field is neutral; a proto zero is a zero."""

from __future__ import annotations

from dataclasses import replace

from rollout.codec.fields import assign, extend
from rollout.types import LogprobMode, SamplingParams
from rollout.v1 import rollout_pb2 as pb

_MODES = {
    LogprobMode.TEMPERED: pb.LOGPROB_MODE_TEMPERED,
    LogprobMode.GREEDY_T1: pb.LOGPROB_MODE_GREEDY_T1,
}


def sampling_to_proto(params: SamplingParams, prefix: str = "sampling.") -> pb.SamplingParams:
    """Every field that has a value is set, so that no reader needs defaults.

    Raises:
        InvalidRequest: a value does not fit its wire type, such as a seed beyond 64 bits.
    """
    message = pb.SamplingParams()
    assign(
        message,
        prefix,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=None if params.seed is None else _signed64(params.seed),
        max_tokens=params.max_tokens,
        include_stop=params.include_stop,
        ignore_eos=params.ignore_eos,
        bar_undefined_tokens=params.bar_undefined_tokens,
    )
    extend(message.stop_token_ids, params.stop_token_ids, f"{prefix}stop_token_ids")
    extend(message.stop, params.stop, f"{prefix}stop")
    extend(message.barred_token_ids, params.barred_token_ids, f"{prefix}barred_token_ids")
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """The parameters as sent; ``top_k`` -1 becomes 0. Values are not judged here."""
    neutral = SamplingParams()
    params = SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else neutral.temperature,
        top_k=message.top_k if message.HasField("top_k") else neutral.top_k,
        top_p=message.top_p if message.HasField("top_p") else neutral.top_p,
        min_p=message.min_p if message.HasField("min_p") else neutral.min_p,
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        stop=tuple(message.stop),
        include_stop=message.include_stop if message.HasField("include_stop") else neutral.include_stop,
        ignore_eos=message.ignore_eos if message.HasField("ignore_eos") else neutral.ignore_eos,
        barred_token_ids=tuple(message.barred_token_ids),
        bar_undefined_tokens=(
            message.bar_undefined_tokens if message.HasField("bar_undefined_tokens") else neutral.bar_undefined_tokens
        ),
    )
    return replace(params, top_k=0) if params.top_k == -1 else params


def requested_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Parameters of a request, through the one gate that in-process callers use too.

    Raises:
        InvalidRequest: a value out of range; ``field`` is "sampling." + name.
    """
    from rollout.sampling import validate_sampling

    return validate_sampling(sampling_from_proto(message))


def _signed64(seed: int) -> int:
    # Keys use the seed modulo 2^64, so both spellings of the upper half are one seed; the wire has the signed one.
    return seed - 2**64 if 2**63 <= seed < 2**64 else seed


def mode_to_proto(mode: LogprobMode) -> pb.LogprobMode.ValueType:
    """Wire value of a log-prob mode."""
    return _MODES[mode]


def mode_from_proto(value: int) -> LogprobMode | None:
    """The mode, or None when the response does not name one that is known."""
    return next((mode for mode, known in _MODES.items() if known == value), None)
