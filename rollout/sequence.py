"""One sequence inside the engine: the only mutable record of a sample's (or a scored sequence's) life."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest
from rollout.given_scores import GivenScores
from rollout.placement import TEXT, Placement
from rollout.prefix_cache import CachedPage
from rollout.stopping import Stopper
from rollout.types import FinishDetail, FinishReason, SampleRequest, ScoreSequence, VersionSpan


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids, their KV progress and pages. ``request`` is set for samples, ``score`` for scored sequences."""

    sample_id: str
    token_ids: list[int]
    """prompt + generated"""
    prompt_len: int
    max_len: int
    """most tokens it may ever hold"""
    request: SampleRequest | None = None
    score: ScoreSequence | None = None
    temperature: float = 1.0
    row_digests: bool = False
    limit: str = "max_tokens"
    """which limit ``max_len`` comes from; "context" when both coincide"""
    seed: int = 0
    """mixed 64-bit seed of this sample"""
    barred: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    num_computed: int = 0
    """leading tokens whose KV is in the cache"""
    pages: list[int] = field(default_factory=list)
    chain: list[CachedPage] = field(default_factory=list)
    """index entries of the leading pages that are indexed; they are the first of ``pages``"""
    tail_offered: bool = False
    """whether its open page was indexed, as far as prefill came, since it last had none"""
    page_keys: list[bytes] = field(default_factory=list)
    """content keys of leading full pages, as far as anyone asked; valid under ``key_root``"""
    key_root: bytes = b""
    kv_version: int = -1
    """weight version that the KV in ``pages`` was computed under"""
    num_seen: int = 0
    """most leading tokens whose KV it ever had"""
    num_cached_tokens: int = 0
    """prompt tokens whose KV came from the prefix cache the first time they were needed"""
    priority: int = 0
    """higher goes first"""
    client: str = ""
    """whose share of the engine it uses"""
    arrival: int = -1
    """place in the order of arrival"""
    ticket: int = -1
    """place in the order of admission; -1 while it waits"""
    set_back: bool = False
    """whether it was ever preempted"""
    num_charged: int = 0
    """leading tokens that its client has paid for"""
    spans: list[VersionSpan] = field(default_factory=list)
    top_logprobs: int = 0
    """likeliest tokens to report at every row whose logits are wanted"""
    given: GivenScores | None = None
    """log-probs of given tokens: of a scored sequence, or of a prompt until they were handed out"""
    placement: Placement = TEXT
    """where its images are"""
    stopper: Stopper | None = None
    finish: FinishDetail | None = None

    def end_by_length(self) -> FinishDetail | None:
        """Set once it is as long as it may get."""
        full = len(self.token_ids) >= self.max_len
        return FinishDetail(FinishReason.LENGTH, limit=self.limit) if full else None

    def end_of_begun(self) -> FinishDetail | None:
        """How a sample ended whose tokens were all delivered and whose end was not; None where some are left to draw.

        Raises:
            InvalidRequest: it is asked for the prompt's log-probs, which such a sample has no step for.
        """
        if self.request is None or not self.request.begun.token_ids:
            return None
        assert self.stopper is not None
        end = self.stopper.ended or self.end_by_length()
        if end is not None and self.given is not None:
            raise InvalidRequest(
                "resume.tokens is a whole sample: nothing is computed for it, so no log-probs of its prompt; ask Score",
                field="prompt_logprobs",
            )
        return end

    @property
    def num_generated(self) -> int:
        """Sampled tokens so far; 0 for a scored sequence."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        """Tokens to feed before the next one can be sampled; for scoring the last token is never fed."""
        total = len(self.token_ids) - (1 if self.score is not None else 0)
        return total - self.num_computed

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose rows need not be computed here: at least one row is, and all whose logits are wanted."""
        return self.given.start - 1 if self.given is not None else len(self.token_ids) - 1

    @property
    def decoding(self) -> bool:
        """Whether the prompt is done and one sampled token waits to be fed."""
        return self.request is not None and self.num_generated > 0 and self.num_uncomputed == 1

    def record_version(self, version: int) -> None:
        """The newest token was sampled under ``version``."""
        end = self.num_generated
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, end)
        else:
            self.spans.append(VersionSpan(version, end - 1, end))
