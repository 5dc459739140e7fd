"""Gates inside verl's actor, on batches that it scores anyway: no pass of their own.

verl computes ``old_log_probs`` before it trains and sends the rollout's log-probs along. The first such batch is the
step-0 gate: all of it must equal the rollout, bit for bit, before the first optimizer step. Every later one feeds the
canary: of the rows sampled under the very weights that the actor holds, a fraction chosen by their ids must be equal
too. Rows of older weights (asynchronous trainers) are not judged. Row digests count as well, if the rollout sent them.

Environment: ``ZERODRIFT_STEP_ZERO`` and ``ZERODRIFT_CANARY`` = strict (raise, the default), audit (warn and go on) or
off; ``ZERODRIFT_CANARY_FRACTION`` in (0, 1], by default 1. To fall back to correction, set the canary to audit and
leave ``algorithm.rollout_correction.rollout_is`` on: as long as bits are equal its weights are exactly 1.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import distributed

from rollout.errors import ConfigError, ParityError, RolloutError
from trainer_bridge.batches import DETAILS, DIGESTS, column, samples_from_arrays
from trainer_bridge.canary import Canary
from trainer_bridge.gates import StepZeroGate
from trainer_bridge.handshake import Mode
from trainer_bridge.records import ScoredSample
from trainer_bridge.verl.align_state import aligned_process

STEP_ZERO, CANARY, FRACTION = "ZERODRIFT_STEP_ZERO", "ZERODRIFT_CANARY", "ZERODRIFT_CANARY_FRACTION"
_ATTRIBUTE = "_zerodrift_gate"

log = logging.getLogger(__name__)


class ActorGate:
    """Step-0 gate and canary of one actor.

    Errors: ConfigError for a mode or a fraction that means nothing.
    """

    def __init__(self, step_zero: Mode = "strict", canary: Mode = "strict", fraction: float = 1.0) -> None:
        if canary not in get_args(Mode):
            raise ConfigError(f"{CANARY}={canary!r} is none of {', '.join(get_args(Mode))}", field=CANARY)
        self._gate = StepZeroGate(step_zero)
        self._mode = canary
        self._canary = Canary(fraction=fraction)
        self.stale_rows = 0
        """rows not judged: sampled under other weights than the actor's, or verl did not say under which"""

    @property
    def checked_tokens(self) -> int:
        """Tokens that the canary compared."""
        return self._canary.checked_tokens

    def check(self, samples: Sequence[ScoredSample], steps: Sequence[tuple[int, int] | None]) -> None:
        """Judge a scored batch.

        Args:
            samples: both sides of every row.
            steps: global steps of the weights that sampled each row, least and greatest; None: unknown.

        Errors: ParityError in strict mode at an unequal bit.
        """
        if not self._gate.is_open:
            self._gate.check(samples)
            return
        if self._mode == "off":
            return
        now = aligned_process().served_step
        current = [s for s, span in zip(samples, steps, strict=True) if now is not None and span == (now, now)]
        self.stale_rows += len(samples) - len(current)
        try:
            self._canary.check(current)
        except ParityError as error:
            if self._mode == "strict":
                raise
            log.warning("%s (%s=audit: training goes on)", error, CANARY)


def check_scored_batch(engine: Any, data: Any, output: Any) -> None:
    """Judge an actor's forward-only batch if it carries ``rollout_log_probs``; references and critics are left alone.

    All ranks raise or none: one that left alone would leave the others in their next collective.

    Errors: ParityError in strict mode when a token differs, on any rank.
    """
    scored = output.get("model_output", {})
    if "rollout_log_probs" not in data or "log_probs" not in scored or engine.engine_config.forward_only:
        return
    gate = getattr(engine, _ATTRIBUTE, None)
    if gate is None:
        gate = ActorGate(_mode(STEP_ZERO), _mode(CANARY), _fraction())
        setattr(engine, _ATTRIBUTE, gate)
    error: RolloutError | None = None
    try:
        gate.check(*_rows(data, scored))
    except RolloutError as found:
        error = found
    elsewhere = _first_of_all_ranks(engine, error)
    if error is not None:
        raise error
    if elsewhere is not None:
        raise ParityError(f"on another rank: {elsewhere}")


def _first_of_all_ranks(engine: Any, error: RolloutError | None) -> str | None:
    if not distributed.is_initialized() or distributed.get_world_size(group := engine.get_data_parallel_group()) == 1:
        return None
    messages: list[str | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(messages, None if error is None else error.message, group=group)
    return next((message for message in messages if message is not None), None)


def wants_digests(data: Any) -> bool:
    """Whether the rollout sent row digests with this batch."""
    return any(told and told.get("row_digests") is not None for told in column(data, DETAILS) or ())


def _mode(name: str) -> Mode:
    return cast(Mode, os.environ.get(name, "strict"))


def _fraction() -> float:
    text = os.environ.get(FRACTION, "1")
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{FRACTION}={text!r} is not a number in (0, 1]", field=FRACTION) from None


def _rows(data: Any, scored: Mapping[str, Any]) -> tuple[list[ScoredSample], list[tuple[int, int] | None]]:
    from verl.workers.utils.padding import no_padding_2_padding

    trainer = no_padding_2_padding(scored["log_probs"], data).float().cpu()
    rollout, mask, tokens = (
        _padded(data[name], trainer) for name in ("rollout_log_probs", "response_mask", "responses")
    )
    lengths = [int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0 for row in mask.bool().numpy()]
    cut = functools.partial(_cut, lengths=lengths)
    digests = no_padding_2_padding(scored[DIGESTS], data).cpu() if DIGESTS in scored else None
    samples = samples_from_arrays(
        cut(trainer),
        cut(rollout),
        cut(mask),
        # Equality of bits does not depend on the label.
        temperature=None,
        otherwise=1.0,
        token_ids=cut(tokens),
        details=column(data, DETAILS),
        trainer_digests=None if digests is None else [row.view(np.uint64) for row in cut(digests)],
    )
    return samples, _steps(data, len(samples))


def _steps(data: Any, rows: int) -> list[tuple[int, int] | None]:
    """Least and greatest global step of the weights that sampled each row; None where that is not certain."""
    least, most = column(data, "min_global_steps"), column(data, "max_global_steps")
    if least is None or most is None:
        return [None] * rows
    details = column(data, DETAILS) or [None] * rows
    found: list[tuple[int, int] | None] = []
    for low, high, told in zip(least, most, details, strict=True):
        # verl knows the last step of a call; ours tell all of the first call's, and later calls are not older.
        spans = (told or {}).get("global_steps")
        if low is None or high is None or (spans is None and aligned_process().calls_cross):
            found.append(None)
        else:
            found.append((min([int(low), *(spans or ())]), int(high)))
    return found


def _cut(rows: torch.Tensor, lengths: Sequence[int]) -> list[Any]:
    return [row[:n] for row, n in zip(rows.numpy(), lengths, strict=True)]


def _padded(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if values.is_nested:
        values = torch.nested.to_padded_tensor(values, 0, output_size=tuple(like.shape))
    return values.cpu()
