"""Records of an explanation: causes, findings, evidence."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Cause(enum.Enum):
    """Where two sides part, in the order they are looked for."""

    NONE = "none"
    """everything compared holds equal bits"""
    WEIGHTS = "weights"
    INPUTS = "inputs"
    SEMANTICS = "semantics"
    NUMERICS = "numerics"
    UNKNOWN = "unknown"
    """they differ, and no question asked here tells why"""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One question and its answer."""

    stage: str
    question: str
    answer: str
    clean: bool | None
    """True: no difference there; False: a difference; None: could not be asked"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference."""

    cause: Cause
    kind: str
    """what sort, e.g. "cast", "temperature", "other kernel", "not invariant" """
    place: str
    """tensor, token, position or operation"""
    sentence: str
    """plain words, no full stop"""
    details: dict[str, Any] = field(default_factory=dict)
    """figures, JSON-ready"""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer: one finding is the verdict, the evidence says how it was reached."""

    finding: Finding
    evidence: tuple[Evidence, ...]
    cpu_s: float
    """processor seconds"""
    also: tuple[Finding, ...] = ()
    """further differences of the same stage"""

    @property
    def cause(self) -> Cause:
        """Class of the verdict."""
        return self.finding.cause

    @property
    def clean(self) -> bool:
        """Whether nothing differs."""
        return self.finding.cause is Cause.NONE


@dataclass(slots=True)
class Notebook:
    """Evidence as it is gathered."""

    rows: list[Evidence] = field(default_factory=list)

    def note(self, stage: str, question: str, answer: str, clean: bool | None) -> None:
        """Write one line."""
        self.rows.append(Evidence(stage, question, answer, clean))
