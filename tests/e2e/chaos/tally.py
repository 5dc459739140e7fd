"""Counts of a chaos run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """What happened, and what must not have."""

    schedules: int = 0
    samples: int = 0
    """asked for, each answered once"""
    tokens: int = 0
    """compared with the calm run"""
    faults: Counter[str] = field(default_factory=Counter)
    """injected, by kind"""
    struck: Counter[str] = field(default_factory=Counter)
    """of them, those that found samples unfinished"""
    resubmitted: int = 0
    """asked anew after the typed error that says so"""
    aborted: int = 0
    """ended by an update of policy abort, with their partial output"""
    crossed: int = 0
    """samples with tokens of more than one version"""
    replaced: int = 0
    """workers that were started again"""
    lost: int = 0
    duplicated: int = 0
    unequal: int = 0
    """tokens whose id, log-probs or digest differ"""
    mislabelled: int = 0
    """tokens under a version that did not sample them"""
    leaked: int = 0
    """KV pages still held after a drain"""
    dropped_records: int = 0
    """steps that a full disk did not take, each of them said"""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.lost or self.duplicated or self.unequal or self.mislabelled or self.leaked)

    def __str__(self) -> str:
        faults = ", ".join(f"{kind} {self.struck[kind]}/{count}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.schedules} schedules, {self.samples} samples, {self.tokens} tokens: {self.lost} lost, "
            f"{self.duplicated} duplicated, {self.unequal} unequal, {self.mislabelled} under a wrong version, "
            f"{self.leaked} pages leaked; faults (while samples ran/all): {faults}; {self.replaced} workers started "
            f"again, {self.crossed} samples crossed an update, {self.aborted} aborted by one, {self.resubmitted} asked "
            f"anew, {self.dropped_records} records dropped on a full disk; {self.seconds:.0f} s"
        )
