"""Compare the parity manifests of the two sides before the first step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rollout.errors import ConfigError, ParityError
from rollout.types import WeightState

Mode = Literal["strict", "audit", "off"]

# Longest matching prefix decides; a key that matches none can change bits, since nobody has shown that it cannot.
_CAN_CHANGE_BITS: Mapping[str, bool] = {
    "attention.": True,
    "device.": True,
    "device.name": False,
    "dtype.": True,
    "environment.": True,
    "host.": False,
    "kernels.": True,
    "library.": True,
    "library.grpcio": False,
    "library.protobuf": False,
    "library.ray": False,
    "lm_head.": True,
    "logprob.": True,
    "model.": True,
    "process.": False,
    "replica.": False,
    "server.": False,
    "weights.": True,
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ManifestDifference:
    """One key whose values differ."""

    key: str
    left: str | None
    """None: the key is absent on this side."""
    right: str | None
    can_change_bits: bool

    def __str__(self) -> str:
        """``key: left | right``, absent sides marked."""
        left = "(absent)" if self.left is None else repr(self.left)
        right = "(absent)" if self.right is None else repr(self.right)
        return f"{self.key}: {left} | {right}"


def can_change_bits(key: str) -> bool:
    """Whether a difference in this manifest key can change a log-prob; unknown keys can."""
    matches = [prefix for prefix in _CAN_CHANGE_BITS if key.startswith(prefix)]
    return _CAN_CHANGE_BITS[max(matches, key=len)] if matches else True


def with_weights(manifest: Mapping[str, str], weights: WeightState) -> dict[str, str]:
    """Manifest plus "weights.version" and "weights.digest", so that stale weights show as a difference too."""
    return {**manifest, "weights.version": str(weights.version), "weights.digest": weights.digest}


def diff_manifests(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[ManifestDifference, ...]:
    """Keys whose values differ or that one side lacks: those that can change bits first, then by key."""
    differences = [
        ManifestDifference(key=key, left=a.get(key), right=b.get(key), can_change_bits=can_change_bits(key))
        for key in a.keys() | b.keys()
        if a.get(key) != b.get(key)
    ]
    return tuple(sorted(differences, key=lambda d: (not d.can_change_bits, d.key)))


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
