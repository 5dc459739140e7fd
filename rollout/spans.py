"""Runs of tokens under one weight version, and samples that are begun somewhere and go on elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a sample were sampled under one weight version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BegunSample:
    """The part of a sample that has been delivered."""

    token_ids: tuple[int, ...]
    """[l]; at most the last one ended the sample, whose end alone was not delivered"""
    spans: tuple[VersionSpan, ...]
    """covering [0, l) in order"""


NOT_BEGUN = BegunSample((), ())
