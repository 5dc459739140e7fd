"""What every engine is asked to do, and the engines that do it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollout.engine import Engine
from rollout.kernels.registry import resolve_kernels
from rollout.model import load_model
from rollout.scheduler import SchedulerLimits
from rollout.types import SampleEvent, SampleRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """N prompts of random ids, each continued by exactly ``new_tokens`` tokens, log-probs on."""

    sequences: int
    prompt_tokens: int = 128
    new_tokens: int = 128
    vocab_size: int = 49152

    def prompts(self) -> np.ndarray:
        """int64 [N, prompt_tokens]"""
        rng = np.random.default_rng(self.sequences)
        return rng.integers(3, self.vocab_size, (self.sequences, self.prompt_tokens))

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return self.sequences * self.new_tokens


class ZerodriftRunner:
    """The native engine in this process."""

    def __init__(self, path: Path, *, threads: int, invariant: bool = True, digests: bool = False) -> None:
        torch.set_num_threads(threads)
        self._kernels = resolve_kernels()
        self._model = load_model(path, dtype=torch.bfloat16, kernels=self._kernels)
        self._invariant, self._digests = invariant, digests
        self.name = "zerodrift" + ("" if invariant else ", invariance off") + (", row digests" if digests else "")

    def run(self, work: Workload) -> int:
        """Generate everything; returns the tokens sampled."""
        limits = SchedulerLimits(512, 128, 4096, 256, 128)
        per_sequence = -(-(work.prompt_tokens + work.new_tokens) // 128) * 128
        engine = Engine(self._model, limits, kv_cache_tokens=work.sequences * per_sequence)
        for i, prompt in enumerate(work.prompts()):
            sampling = SamplingParams(seed=i, max_tokens=work.new_tokens, ignore_eos=True)
            request = SampleRequest(f"s{i}", tuple(prompt.tolist()), sampling, row_digests=self._digests)
            engine.add(engine.effective_request(request))
        tokens = 0
        with self._mode():
            while engine.num_running or engine.num_waiting:
                tokens += sum(isinstance(e, SampleEvent) and e.chunk is not None for e in engine.step())
        return tokens

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        with self._kernels.invariant_mode() if self._invariant else contextlib.nullcontext():
            yield


class HuggingFaceRunner:
    """transformers' own ``generate`` in the same environment: one batch, SDPA, sampling, logits kept for log-probs."""

    name = "Hugging Face generate"

    def __init__(self, path: Path, *, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    @torch.no_grad()
    def run(self, work: Workload) -> int:
        """Generate everything; returns the tokens sampled."""
        torch.manual_seed(0)
        ids = torch.from_numpy(work.prompts())
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            temperature=1.0,
            min_new_tokens=work.new_tokens,
            max_new_tokens=work.new_tokens,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
        )
        for step, scores in enumerate(out.scores):
            torch.log_softmax(scores.float(), -1).gather(1, out.sequences[:, work.prompt_tokens + step, None])
        return int(out.sequences[:, work.prompt_tokens :].numel())
