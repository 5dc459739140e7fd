"""A canary: re-score a fraction of what is sampled while training runs, and stop at the first unequal bit."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from rollout.errors import ConfigError, ParityError
from rollout.types import Float32Array
from trainer_bridge.compare import compare
from trainer_bridge.correction_config import CorrectionConfig
from trainer_bridge.records import ScoredSample
from trainer_bridge.report import verdict
from trainer_bridge.rollout_record import RolloutRecord

Action = Literal["raise", "correct"]
Scorer = Callable[[Sequence[RolloutRecord]], Sequence[Float32Array]]
"""Records to float32 [L] nats each: the training forward, or ``Score`` of the service."""

_logger = logging.getLogger(__name__)


class Canary:
    """Chooses samples by a hash of their ids and tokens, so a rerun chooses the same, whatever the order.

    Args:
        score: how the chosen samples are scored again; None where batches come scored (``check``).
        fraction: of samples, in (0, 1].
        action: "raise" at the first unequal bit, or "correct": warn once and hand out ``correction`` from then on.
        correction: what to train with after a mismatch; without it nothing changes until one is found.
    """

    def __init__(
        self,
        score: Scorer | None = None,
        *,
        fraction: float,
        action: Action = "raise",
        correction: CorrectionConfig | None = None,
    ) -> None:
        if not 0.0 < fraction <= 1.0:
            raise ConfigError(f"canary fraction {fraction} is outside (0, 1]", field="fraction")
        if action not in get_args(Action):
            raise ConfigError(f"canary action {action!r} is none of {', '.join(get_args(Action))}", field="action")
        if (action == "correct") != (correction is not None):
            raise ConfigError(
                "a canary that corrects needs a correction, and one that raises has none", field="correction"
            )
        self._score = score
        self._threshold = int(fraction * 2**64)
        self._action = action
        self._correction = correction
        self._tripped = False
        self.checked_tokens = 0

    @property
    def tripped(self) -> bool:
        """Whether an unequal bit was found."""
        return self._tripped

    @property
    def correction(self) -> CorrectionConfig | None:
        """What to correct with now: None as long as the rollout proved exact."""
        return self._correction if self._tripped else None

    def chosen(self, sample: RolloutRecord | ScoredSample) -> bool:
        """Whether this sample is compared."""
        state = hashlib.blake2b(digest_size=8)
        state.update(sample.prompt_ids.tobytes() + sample.token_ids.tobytes())
        state.update(f"{sample.sample_index}|{sample.seed}".encode())
        return int.from_bytes(state.digest(), "little") < self._threshold

    def watch(self, records: Sequence[RolloutRecord]) -> int:
        """Re-score the chosen ones of a batch; returns how many tokens were compared.

        Errors: ParityError at an unequal bit, unless the canary corrects; ConfigError without a scorer.
        """
        if self._score is None:
            raise ConfigError("a canary without a scorer compares scored samples only (check)", field="score")
        picked = [record for record in records if record.token_ids.size and self.chosen(record)]
        if not picked:
            return 0
        return self._judge([r.scored(values) for r, values in zip(picked, self._score(picked), strict=True)])

    def check(self, samples: Sequence[ScoredSample]) -> int:
        """Compare the chosen ones of a batch that is scored already; returns how many tokens were compared.

        Errors: ParityError at an unequal bit, unless the canary corrects.
        """
        return self._judge([sample for sample in samples if sample.mask.any() and self.chosen(sample)])

    def _judge(self, scored: Sequence[ScoredSample]) -> int:
        result = compare(scored)
        self.checked_tokens += result.tokens
        if result.has_data and not result.bitwise_equal:
            if self._action == "raise":
                raise ParityError(f"canary: {verdict(result)}; the rollout is no longer exact: stop, find out why")
            if not self._tripped:
                _logger.warning("canary: %s; correcting from here on: %s", verdict(result), self._correction)
            self._tripped = True
        return result.tokens
