"""The step-0 gate inside verl's actor: its first scored batch must equal the rollout, bit for bit.

verl computes ``old_log_probs`` before the first optimizer step and sends the rollout's log-probs along, so the gate
needs no pass of its own. ``ZERODRIFT_STEP_ZERO`` = strict (raise, the default), audit (warn) or off.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch

from trainer_bridge.batches import samples_from_arrays
from trainer_bridge.gates import StepZeroGate
from trainer_bridge.handshake import Mode

VARIABLE = "ZERODRIFT_STEP_ZERO"
_ATTRIBUTE = "_zerodrift_step_zero"


def check_first_batch(engine: Any, data: Any, output: Any) -> None:
    """Compare an actor's first forward-only batch that carries ``rollout_log_probs``; later batches are not looked at.

    Errors: ParityError in strict mode when a token differs.
    """
    if "rollout_log_probs" not in data or engine.engine_config.forward_only:
        return
    gate = getattr(engine, _ATTRIBUTE, None)
    if gate is None:
        gate = StepZeroGate(cast(Mode, os.environ.get(VARIABLE, "strict")))
        setattr(engine, _ATTRIBUTE, gate)
    if gate.is_open:
        return
    from verl.workers.utils.padding import no_padding_2_padding

    trainer = no_padding_2_padding(output["model_output"]["log_probs"], data).float().cpu()
    rollout, mask = (_padded(data[name], trainer) for name in ("rollout_log_probs", "response_mask"))
    ours, theirs, masks = (list(rows.numpy()) for rows in (trainer, rollout, mask))
    # The rollout's own temperature is in its details; equality of bits does not depend on the label.
    gate.check(samples_from_arrays(ours, theirs, masks, temperature=1.0))


def _padded(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if values.is_nested:
        values = torch.nested.to_padded_tensor(values, 0, output_size=tuple(like.shape))
    return values.cpu()
