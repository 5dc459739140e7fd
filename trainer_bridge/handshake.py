"""Compare the parity manifests of the two sides before the first step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, get_args

from rollout.errors import ConfigError, ParityError
from rollout.manifest_diff import ManifestDifference, can_change_bits, diff_manifests
from rollout.types import WeightState

__all__ = ["ManifestDifference", "Mode", "can_change_bits", "diff_manifests", "require_equal", "with_weights"]

Mode = Literal["strict", "audit", "off"]

_logger = logging.getLogger(__name__)


def with_weights(manifest: Mapping[str, str], weights: WeightState) -> dict[str, str]:
    """Manifest plus "weights.version" and "weights.digest", so that stale weights show as a difference too."""
    return {**manifest, "weights.version": str(weights.version), "weights.digest": weights.digest}


def require_equal(a: Mapping[str, str], b: Mapping[str, str], *, mode: Mode) -> tuple[ManifestDifference, ...]:
    """Check rollout manifest ``a`` against trainer manifest ``b``; return every difference found.

    "strict" refuses differences that can change bits, "audit" logs them as warnings, "off" compares and says nothing.
    In strict mode two empty manifests are refused: nothing was checked.

    Errors: ParityError listing each such difference; ConfigError for another mode.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"handshake mode {mode!r} is none of {', '.join(get_args(Mode))}", field="mode")
    differences = diff_manifests(a, b)
    serious = [difference for difference in differences if difference.can_change_bits]
    if mode == "strict":
        if not a and not b:
            raise ParityError("both parity manifests are empty, so nothing can be checked; use mode audit to go on")
        if serious:
            listing = "\n".join(f"  {difference}" for difference in serious)
            raise ParityError(
                f"rollout and trainer differ in {len(serious)} manifest key(s) that can change log-probs "
                f"(rollout | trainer):\n{listing}\nmake them equal, or use mode audit to measure with the difference"
            )
    if mode == "audit":
        for difference in serious:
            _logger.warning("parity manifest differs (rollout | trainer): %s", difference)
    return differences
