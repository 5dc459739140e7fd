"""What a demo run measured, step by step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainer_bridge.records import Comparison
from trainer_bridge.report import to_json


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One rollout, comparison and update."""

    step: int
    weight_version: int
    """version that sampled this step's tokens"""
    weight_digest: str
    aligned: Comparison
    """rollout against the aligned training forward"""
    ordinary: Comparison
    """rollout against an ordinary trainer: SDPA, padded, no invariant mode"""
    mean_reward: float
    mixed_groups: int
    """groups whose samples earned different rewards: those with a gradient"""
    distinct_siblings: bool
    """every group holds at least two different samples"""
    rollout_s: float
    train_s: float
    """aligned forward, backward, optimizer"""
    update_s: float
    """weights over gRPC to every replica"""

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of rollout."""
        return self.aligned.tokens / self.rollout_s

    def to_json(self) -> dict[str, Any]:
        """Every figure of the step."""
        figures = {
            name: getattr(self, name)
            for name in (
                "step", "weight_version", "weight_digest", "mean_reward", "mixed_groups", "distinct_siblings",
                "rollout_s", "train_s", "update_s", "tokens_per_s",
            )
        }  # fmt: skip
        return figures | {"aligned": to_json(self.aligned), "ordinary": to_json(self.ordinary)}


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A whole run."""

    steps: tuple[StepRecord, ...]
    findings: tuple[str, ...]
    """what differs, in the order it was found; empty when nothing does"""
    token_digest: str
    """SHA-256 over every sampled id and log-prob"""
    tokens: int
    seed: int
    replicas: int
    threads: int
    seconds: float
    manifest: dict[str, str]

    @property
    def exact(self) -> bool:
        """Nothing differs."""
        return not self.findings and all(s.aligned.bitwise_equal for s in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Every figure of the run."""
        plain = asdict(self)
        plain["steps"] = [s.to_json() for s in self.steps]
        plain["exact"] = self.exact
        return plain
