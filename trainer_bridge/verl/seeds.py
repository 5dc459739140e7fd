"""Seeds of a verl run: from run seed, global step, prompt, sample and turn. Never from replica, request id or arrival.

verl seeds every request of a replica alike (``replica_rank + rollout.seed``), so siblings on one replica would be
equal and tokens would depend on routing. Here two siblings differ by ``index`` or ``occurrence`` and nothing else
enters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DOMAIN = b"zerodrift.verl.seed/1"


@dataclass(frozen=True, slots=True)
class SampleTag:
    """Which sample of the run a generate call belongs to; equal tags draw equal tokens."""

    step: int
    """global step whose weights began the trajectory"""
    prompt: str
    """``prompt_digest`` of the trajectory's first prompt, hex"""
    index: int
    """place in verl's batch (``priority``); 0 where verl does not tell"""
    occurrence: int
    """how many trajectories with the same (step, prompt, index) began earlier"""
    turn: int
    """assistant turn, from 0; an aborted turn that is resumed keeps its number"""


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """BLAKE2b-128 of token ids [P] as little-endian int64, hex."""
    return hashlib.blake2b(np.asarray(prompt_ids, "<i8").tobytes(), digest_size=16).hexdigest()


def derive_seed(run_seed: int, tag: SampleTag) -> int:
    """64-bit seed of one turn of one sample."""
    fields = (run_seed, tag.step, tag.prompt, tag.index, tag.occurrence, tag.turn)
    state = hashlib.blake2b(_DOMAIN, digest_size=8)
    state.update("|".join(map(str, fields)).encode())
    return int.from_bytes(state.digest(), "little")
