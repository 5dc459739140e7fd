"""What a correction does, in verl's words: ``algorithm.rollout_correction``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollout.errors import ConfigError

IS_LEVELS = ("token", "sequence")
RS_OPTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a weight or of a statistic."""

    upper: float
    lower: float | None = None


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """Importance weights and rejection; the defaults correct nothing and only measure.

    Errors: ConfigError for names or thresholds that verl would refuse too.
    """

    rollout_is: Literal["token", "sequence"] | None = None
    """Level of the importance weights; None: no weights."""
    rollout_is_threshold: float | str = 2.0
    """A number truncates (TIS); "lower_upper" sets weights outside to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: str | None = None
    """Comma list of ``RS_OPTIONS``; a token stays if every option keeps it. None: nothing is rejected."""
    rollout_rs_threshold: float | str | None = None
    """One threshold for all options, or one each: k1 "lower_upper" or "u" (1/u to u), k2 and k3 an upper bound."""

    def __post_init__(self) -> None:
        """Check by parsing."""
        if self.rollout_is is not None and self.rollout_is not in IS_LEVELS:
            raise ConfigError(f"rollout_is {self.rollout_is!r} is none of {', '.join(IS_LEVELS)}", field="rollout_is")
        if type(self.rollout_is_batch_normalize) is not bool:
            raise ConfigError(
                f"rollout_is_batch_normalize {self.rollout_is_batch_normalize!r} is neither true nor false",
                field="rollout_is_batch_normalize",
            )
        if self.rollout_is is not None:
            self.is_bounds()
        if self.rollout_rs is not None:
            self.rs_bounds()

    def is_bounds(self) -> Bounds:
        """Limits of the importance weights; with a lower one they mask instead of truncating."""
        lower, upper = _pair(str(self.rollout_is_threshold), "rollout_is_threshold")
        return Bounds(upper, lower)

    def rs_bounds(self) -> dict[str, Bounds]:
        """Limits of each rejection option, in the order given; a repeated option counts once."""
        options = list(dict.fromkeys(part.strip() for part in (self.rollout_rs or "").split(",") if part.strip()))
        unknown = [option for option in options if option not in RS_OPTIONS]
        if unknown or not options:
            raise ConfigError(
                f"rollout_rs {self.rollout_rs!r}: {unknown or 'nothing'} is none of {', '.join(RS_OPTIONS)}",
                field="rollout_rs",
            )
        return dict(zip(options, self._rs_each(options), strict=True))

    def _rs_each(self, options: Sequence[str]) -> list[Bounds]:
        texts = [
            part.strip()
            for part in str("" if self.rollout_rs_threshold is None else self.rollout_rs_threshold).split(",")
            if part.strip()
        ]
        if len(texts) == 1:
            texts *= len(options)
        if len(texts) != len(options):
            raise ConfigError(
                f"rollout_rs_threshold {self.rollout_rs_threshold!r} holds {len(texts)} thresholds for {len(options)} "
                "options; give one for all, or one each",
                field="rollout_rs_threshold",
            )
        return [_rs_bounds(option, text) for option, text in zip(options, texts, strict=True)]


def _rs_bounds(option: str, text: str) -> Bounds:
    lower, upper = _pair(text, "rollout_rs_threshold")
    if option.endswith("k1"):
        lower = 1.0 / upper if lower is None else lower
        if lower > upper:
            raise ConfigError(
                f"rollout_rs_threshold {text!r}: {option} keeps ratios from {lower:g} to {upper:g}, which are none; a "
                "single value u means 1/u to u, so it must be at least 1",
                field="rollout_rs_threshold",
            )
        # Ratios, compared as logarithms.
        return Bounds(math.log(upper), math.log(lower))
    if lower is not None:
        raise ConfigError(
            f"rollout_rs_threshold {text!r}: {option} has an upper bound only", field="rollout_rs_threshold"
        )
    return Bounds(upper)


def _pair(text: str, field: str) -> tuple[float | None, float]:
    first, separator, second = text.strip().partition("_")
    try:
        lower, upper = (float(first), float(second)) if separator else (None, float(first))
    except ValueError:
        raise ConfigError(f'{field} {text!r} is neither a number nor "lower_upper"', field=field) from None
    if not 0.0 < upper < math.inf or (lower is not None and not 0.0 < lower <= upper):
        raise ConfigError(f"{field} {text!r} must satisfy 0 < lower <= upper < inf", field=field)
    return lower, upper
