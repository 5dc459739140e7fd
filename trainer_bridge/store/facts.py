"""What a caller says about a run, a step and a sample beyond the log-probs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rollout.errors import InvalidRequest
from rollout.types import SamplingParams
from trainer_bridge.store.schema import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class RunHead:
    """Head of a run: who made it, of what. Stored as ``run.json``."""

    run: str
    """Name: letters, digits, '.', '_', '-'."""
    source: str = ""
    """What made it, such as "demo" or "verl"."""
    model: str = ""
    note: str = ""
    sibling: str = ""
    """Name of a run over the same tokens to compare with, such as the same rollouts against an ordinary trainer."""
    manifest: Mapping[str, str] = field(default_factory=dict)
    """The rollout's parity manifest."""
    trainer_manifest: Mapping[str, str] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)
    """Certificate of the rollout's device, as its JSON says; empty: none was given."""
    created: float = field(default_factory=time.time)
    """Seconds since 1970."""
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunHead:
        """Read back; keys of later versions are ignored. Errors: InvalidRequest for anything but a head."""
        try:
            value = json.loads(text)
            return cls(**{name: value[name] for name in cls.__dataclass_fields__ if name in value})
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"run.json is not a run's head: {error}") from error


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is known of a step besides its tokens."""

    step: int
    weight_version: int | None = None
    weight_digest: str = ""
    rewards: tuple[float, ...] = ()
    """One a sample, in any order; empty: unknown."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Name of a phase -> seconds; "rollout" gives tokens a second."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Further figures by the trainer's own names, such as verl's."""
    findings: tuple[str, ...] = ()
    """Causes that are known by name, such as "temperature: ...", in the order they were found."""


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What is known of a sample besides its tokens."""

    sampling: SamplingParams | None = None
    """Effective parameters; None: unknown."""
    reward: float | None = None
    manifest_digest: str | None = None


def filter_name(sampling: SamplingParams | None) -> str:
    """The filters of a request in words, such as "top_k=50 top_p=0.9"; "none" without, "unknown" when not said."""
    if sampling is None:
        return "unknown"
    parts = [f"top_k={sampling.top_k}"] if sampling.top_k > 0 else []
    parts += [f"top_p={sampling.top_p:g}"] if sampling.top_p < 1.0 else []
    parts += [f"min_p={sampling.min_p:g}"] if sampling.min_p > 0.0 else []
    parts += [f"barred={len(sampling.barred_token_ids)}"] if sampling.barred_token_ids else []
    parts += ["undefined barred"] if sampling.bar_undefined_tokens else []
    return " ".join(parts) or "none"


def writer_name(rank: int = 0) -> str:
    """A name that no other writer of the run has, and that a restarted one has again: rank and host."""
    return f"rank{rank}-{socket.gethostname()}"
