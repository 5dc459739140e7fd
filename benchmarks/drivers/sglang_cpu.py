"""SGLang on CPU, in its own environment: attention by torch, radix cache on, log-prob of the drawn token.

Its own CPU kernels need a source build and AMX; without them SGLang itself falls back to what runs here.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.drivers.channel import Job, Sample, serve


class SglangEngine:
    """The offline engine; its scheduler is a process of its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        import sglang

        self._version: str = sglang.__version__
        self._engine = sglang.Engine(
            model_path=config["model"],
            device="cpu",
            dtype="bfloat16",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            skip_tokenizer_init=True,
            # It keeps some tokens of both for itself, and would cut the last samples short without a word.
            context_length=config["max_length"] + 128,
            max_total_tokens=config["kv_tokens"] + config["max_length"],
            max_running_requests=config["max_sequences"],
            disable_cuda_graph=True,
            log_level="warning",
            random_seed=0,
        )

    def facts(self) -> dict[str, Any]:
        """Versions and settings."""
        import torch

        return {
            "sglang": self._version,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "attention": "torch_native",
        }

    def run(self, job: Job) -> list[Sample]:
        """One call of ``generate``."""
        sampling = {"temperature": 1.0, "max_new_tokens": job.new_tokens, "ignore_eos": True, "n": job.samples}
        results = self._engine.generate(input_ids=job.prompts, sampling_params=sampling, return_logprob=True)
        samples: list[Sample] = []
        for result in results:
            drawn = result["meta_info"]["output_token_logprobs"]
            samples.append(([token for _, token, *_ in drawn], [logprob for logprob, *_ in drawn]))
        return samples


if __name__ == "__main__":
    serve(SglangEngine)
