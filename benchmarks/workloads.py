"""What every engine is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PAGE = 128
"""Tokens a KV page, zerodrift's default and vLLM's on CPU."""
_FIRST_ID = 3
"""Ids below are the special ones of the models here."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of random ids, each continued ``samples`` times by exactly ``new_tokens`` tokens, T = 1, log-probs on."""

    name: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    samples: int = 1
    shared_tokens: int = 0
    """leading prompt tokens that all prompts have in common"""

    @property
    def sequences(self) -> int:
        """Continuations in all."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Generated tokens in all."""
        return self.sequences * self.new_tokens

    @property
    def length(self) -> int:
        """Tokens of one sequence at its end."""
        return self.prompt_tokens + self.new_tokens

    @property
    def kv_tokens(self) -> int:
        """KV memory in tokens that an engine with shared prefix pages needs to run everything at once."""
        # The last prompt token is computed by every sample, so its page is nobody's to share. What different prompts
        # share is not counted: engines may keep it once or not.
        whole = -(-self.length // PAGE)
        shared = (self.prompt_tokens - 1) // PAGE if self.samples > 1 else 0
        return PAGE * (self.prompts * shared + self.sequences * (whole - shared))

    @property
    def title(self) -> str:
        """For the head of a table."""
        times = f" x {self.samples}" if self.samples > 1 else ""
        return f"{self.prompts}{times} x ({self.prompt_tokens} + {self.new_tokens})"

    def job(self, vocab_size: int, turn: int) -> dict[str, Any]:
        """The message to a runner. Another turn has other prompts, so no engine finds the last turn's in its cache."""
        rng = np.random.default_rng([self.prompts, self.prompt_tokens, self.shared_tokens, turn])
        ids = rng.integers(_FIRST_ID, vocab_size, (self.prompts, self.prompt_tokens))
        ids[:, : self.shared_tokens] = ids[0, : self.shared_tokens]
        return {"prompts": ids.tolist(), "samples": self.samples, "new_tokens": self.new_tokens, "seed": turn}


def decode_workload(sequences: int, prompt_tokens: int = 128, new_tokens: int = 128) -> Workload:
    """N prompts, one continuation each."""
    return Workload(f"n{sequences}", sequences, prompt_tokens, new_tokens)


STANDARD = {
    w.name: w
    for w in (
        decode_workload(1),
        decode_workload(8),
        decode_workload(32),
        Workload("grpo", prompts=8, prompt_tokens=512, new_tokens=128, samples=8),
        Workload("long", prompts=2, prompt_tokens=2048, new_tokens=128),
    )
}
"""By name: the three batch sizes, a GRPO step with shared prompts, and long prompts."""
