"""What is certified, and how one family of checks reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from rollout.kernels.base import Decoder, KernelSet
from rollout.kernels.edges import edge_lengths
from rollout.model import ModelSpec, SharedModel

Level = Literal["quick", "full"]
STRANGER_ROWS = (9, 10, 64, 511, 512)
"""Prefill rows beside a decoding sequence: around tiles of 8 and 16 rows, and around a KV tile of 512."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One comparison of bits."""

    name: str
    compared: int
    """elements"""
    unequal: int
    """elements whose bits differ; for a property that is no comparison, 1 where it fails"""
    detail: str = ""

    @property
    def holds(self) -> bool:
        """Something was compared and all of it was equal."""
        return self.compared > 0 and self.unequal == 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with its kernel set, on this machine."""

    model: SharedModel
    decoder: Decoder | None
    """the kernel set's own forward of a rollout step, where it has one"""
    level: Level
    threads: tuple[int, ...]
    """thread counts to be tried; serving allows these"""
    seed: int = 0

    @property
    def kernels(self) -> KernelSet:
        """The set under test."""
        return self.model.kernels

    @property
    def spec(self) -> ModelSpec:
        """Sizes of the model."""
        return self.model.spec

    @property
    def full(self) -> bool:
        """Whether time does not matter."""
        return self.level == "full"

    @property
    def longest(self) -> int:
        """Longest sequence of the attention family, tokens."""
        # One whole period of every edge, and a page more.
        page, period = self.kernels.page_size, max(e.period for e in self.kernels.length_edges())
        wanted = 1100 if self.full else max(period + page + 2, 2 * page + 2, 66)
        return min(wanted, self.spec.context_length)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths around every edge that the kernel set declares."""
        return edge_lengths(self.kernels.length_edges(), self.longest, multiples=None if self.full else 2)

    def generator(self, salt: int) -> torch.Generator:
        """Same draws in every run."""
        return torch.Generator().manual_seed(self.seed * 1000 + salt)

    def random(self, salt: int, *shape: int) -> torch.Tensor:
        """Standard normal in the model's dtype, on the set's device, where everything that is certified must run."""
        return torch.randn(*shape, generator=self.generator(salt)).to(self.spec.dtype).to(self.kernels.device)

    def wide(self, salt: int, *shape: int) -> torch.Tensor:
        """Standard normal in float32, every bit of it: sums of bfloat16 values are often exact in any order."""
        return torch.randn(*shape, generator=self.generator(salt)).to(self.kernels.device)

    def token_ids(self, salt: int, count: int) -> torch.Tensor:
        """int64 [count] anywhere in the vocabulary, on the host like every step's tables."""
        return torch.randint(0, self.spec.vocab_size, (count,), generator=self.generator(salt))


@dataclass(frozen=True, slots=True)
class Family:
    """One group of checks and the control that shows it can fail."""

    name: str
    title: str
    checks: Callable[[Subject], Iterator[Outcome]]
    control: Callable[[Subject], Outcome]
    """The same comparison with a fault in it: an outcome that must not hold."""


def count_unequal(left: torch.Tensor, right: torch.Tensor) -> int:
    """Elements whose bits differ; a NaN equals the same NaN. Shapes and dtypes must be equal."""
    assert left.shape == right.shape and left.dtype == right.dtype, f"{left.shape} against {right.shape}"
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    kind = kinds[left.dtype.itemsize]
    left, right = left.cpu().contiguous().view(kind), right.cpu().contiguous().view(kind)
    return 0 if torch.equal(left, right) else int((left != right).sum())


def compare(name: str, left: torch.Tensor, right: torch.Tensor, detail: str = "") -> Outcome:
    """Bits of two tensors of one shape."""
    return Outcome(name, left.numel(), count_unequal(left, right), detail)
