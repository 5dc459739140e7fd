"""Join the turns of a conversation into one row, token by token, without ever decoding and encoding text.

Decode-then-encode is not the identity on ids, so turn k's prompt and tokens must be an exact prefix of turn k+1's
prompt; what lies between is the tool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest, ParityError
from rollout.types import Int32Array, SamplingParams, VersionSpan
from trainer_bridge.rollout_record import RolloutRecord


def full_ids(turn: RolloutRecord) -> Int32Array:
    """Prompt and sample, int32 [P + L]."""
    return np.concatenate([turn.prompt_ids, turn.token_ids])


def check_prefix(turns: Sequence[RolloutRecord]) -> None:
    """Turn k's full ids are an exact prefix of turn k+1's prompt, for every k.

    Errors: ParityError with the turns and the first differing index.
    """
    for k, (before, after) in enumerate(pairwise(turns)):
        whole, prompt = full_ids(before), after.prompt_ids
        shared = min(whole.size, prompt.size)
        differ = np.flatnonzero(whole[:shared] != prompt[:shared])
        if differ.size:
            index = int(differ[0])
            raise ParityError(
                f"turn {k + 1}'s prompt differs from turn {k}'s ids first at index {index}: id {prompt[index]} instead "
                f"of {whole[index]}; append the tool's ids to the sampled ids, never re-encode text"
            )
        if prompt.size < whole.size:
            raise ParityError(
                f"turn {k + 1}'s prompt ends at index {prompt.size} but turn {k} has {whole.size} ids; the first "
                f"differing index is {prompt.size}, where id {whole[prompt.size]} is missing"
            )


def merge_turns(turns: Sequence[RolloutRecord], *, max_tokens: int | None = None) -> RolloutRecord:
    """One row of all turns: the first prompt, then samples and tool tokens in order.

    Tool tokens get mask 0 and NaN log-probs. Finish, request id and sample index are the last, the first and the first
    turn's. ``max_tokens`` bounds the row's tokens after the first prompt: a longer row is refused, never cut.

    Errors: InvalidRequest for no turns or too long a row; ParityError when turns do not join or disagree in mode,
    temperature or filters.
    """
    if not turns:
        raise InvalidRequest("no turns to merge; give at least one", field="turns")
    check_prefix(turns)
    _require_same_meaning(turns)
    first, last = turns[0], turns[-1]
    token_ids = full_ids(last)[first.prompt_ids.size :]
    if max_tokens is not None and token_ids.size > max_tokens:
        raise InvalidRequest(
            f"the merged row has {token_ids.size} tokens, the limit is {max_tokens}; raise the limit or drop the "
            "conversation: a row is never cut",
            field="max_tokens",
        )
    size = token_ids.size
    every_span = all(turn.spans or not turn.mask.any() for turn in turns)
    merged = RolloutRecord(
        request_id=first.request_id,
        sample_index=first.sample_index,
        prompt_ids=first.prompt_ids,
        token_ids=token_ids,
        policy_logprobs=_spread(turns, size, "policy_logprobs", np.float32(np.nan)),
        behavior_logprobs=_spread_optional(turns, size, "behavior_logprobs", np.float32(np.nan)),
        mask=_spread(turns, size, "mask", np.bool_(False)),
        row_digests=_spread_optional(turns, size, "row_digests", np.uint64(0)),
        finish=last.finish,
        seed=first.seed if len({turn.seed for turn in turns}) == 1 else None,
        sampling=_common_sampling(turns),
        mode=first.mode,
        spans=_shifted_spans(turns) if every_span else (),
        replica=_joined(turns),
        weight_version=last.weight_version,
        manifest_digest=first.manifest_digest if len({turn.manifest_digest for turn in turns}) == 1 else None,
        temperature=first.temperature,
        # A tool's tokens have no alternatives, so a row of several turns has none.
        top=first.top if len(turns) == 1 else None,
        prompt_score=first.prompt_score,
    )
    _check_conservation(turns, merged)
    return merged


def _offsets(turns: Sequence[RolloutRecord]) -> list[int]:
    return [turn.prompt_ids.size - turns[0].prompt_ids.size for turn in turns]


def _spread(turns: Sequence[RolloutRecord], size: int, field: str, absent: np.generic) -> npt.NDArray[Any]:
    row = np.full(size, absent, dtype=absent.dtype)
    for offset, turn in zip(_offsets(turns), turns, strict=True):
        row[offset : offset + turn.token_ids.size] = getattr(turn, field)
    return row


def _spread_optional(
    turns: Sequence[RolloutRecord], size: int, field: str, absent: np.generic
) -> npt.NDArray[Any] | None:
    if any(getattr(turn, field) is None for turn in turns):
        return None
    return _spread(turns, size, field, absent)


def _shifted_spans(turns: Sequence[RolloutRecord]) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(version=span.version, start=span.start + offset, end=span.end + offset)
        for offset, turn in zip(_offsets(turns), turns, strict=True)
        for span in turn.spans
    )


def _neutral(sampling: SamplingParams | None) -> SamplingParams | None:
    return None if sampling is None else replace(sampling, seed=None, max_tokens=None)


def _require_same_meaning(turns: Sequence[RolloutRecord]) -> None:
    first = turns[0]
    for k, turn in enumerate(turns):
        for name, left, right in (
            ("mode", first.mode, turn.mode),
            ("temperature", first.temperature, turn.temperature),
            ("sampling", _neutral(first.sampling), _neutral(turn.sampling)),
        ):
            if left != right:
                raise ParityError(
                    f"turn {k} has {name} {right}, turn 0 has {left}; one row has one meaning: keep such turns apart"
                )


def _common_sampling(turns: Sequence[RolloutRecord]) -> SamplingParams | None:
    first = turns[0].sampling
    return first if all(turn.sampling == first for turn in turns) else _neutral(first)


def _joined(turns: Sequence[RolloutRecord]) -> str | None:
    names = dict.fromkeys(turn.replica for turn in turns if turn.replica is not None)
    return ",".join(names) if names else None


def _check_conservation(turns: Sequence[RolloutRecord], merged: RolloutRecord) -> None:
    sampled = sum(turn.token_ids.size for turn in turns)
    tool = sum(
        after.prompt_ids.size - before.prompt_ids.size - before.token_ids.size for before, after in pairwise(turns)
    )
    model = sum(int(np.count_nonzero(turn.mask)) for turn in turns)
    if sampled + tool != merged.token_ids.size or model != int(np.count_nonzero(merged.mask)):
        raise ParityError(
            f"merging lost tokens: {sampled} sampled + {tool} tool tokens against {merged.token_ids.size} in the row, "
            f"{model} model tokens against {int(np.count_nonzero(merged.mask))} at mask 1"
        )
