"""Gates before and during training: the first batch must be equal, and the weights must be the same bytes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import get_args

from rollout.errors import ConfigError, ParityError
from rollout.types import ServerInfo, WeightState
from trainer_bridge.compare import compare
from trainer_bridge.handshake import ManifestDifference, Mode, require_equal, with_weights
from trainer_bridge.records import Comparison, ScoredSample
from trainer_bridge.report import verdict

_logger = logging.getLogger(__name__)


def handshake(
    info: ServerInfo, trainer: Mapping[str, str], weights: WeightState, *, mode: Mode = "strict"
) -> tuple[ManifestDifference, ...]:
    """Compare what the service computes with and serves against the trainer's manifest and weight digest.

    Errors: ParityError in strict mode, naming every difference that can change a log-prob; ConfigError for a mode.
    """
    # Version numbers are each side's own count; the digest says whether the bytes are the same.
    served = with_weights(info.manifest, WeightState(0, info.weights.digest))
    return require_equal(served, with_weights(trainer, WeightState(0, weights.digest)), mode=mode)


class StepZeroGate:
    """Opens once a batch, scored before any optimizer step, is equal bit for bit. Training starts behind it.

    "audit" opens with a warning where "strict" raises; "off" is open from the start.
    """

    def __init__(self, mode: Mode = "strict") -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"gate mode {mode!r} is none of {', '.join(get_args(Mode))}", field="mode")
        self._mode = mode
        self._open = mode == "off"

    @property
    def is_open(self) -> bool:
        """Whether training may start."""
        return self._open

    def check(self, samples: Sequence[ScoredSample]) -> Comparison:
        """Compare a batch and open, or refuse.

        Errors: ParityError in strict mode when a token differs, or when there is no token to compare.
        """
        comparison = compare(samples)
        if comparison.bitwise_equal or self._mode == "off":
            self._open = True
            return comparison
        message = (
            f"step-0 gate: {verdict(comparison)}. Same checkpoint, no optimizer step: look at weight conversion, "
            "temperature and manifests before the kernels; mode audit goes on and measures"
        )
        if self._mode == "strict":
            raise ParityError(message)
        _logger.warning("%s", message)
        self._open = True
        return comparison

    def require_open(self) -> None:
        """Errors: ParityError while closed."""
        if not self._open:
            raise ParityError("training was started before the step-0 gate opened; give it a batch first (check)")
