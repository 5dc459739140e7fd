"""vLLM on CPU, in its own environment: compiled, prefix cache on, log-prob of the drawn token."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.drivers.channel import Job, Sample, serve


class VllmEngine:
    """The offline engine in this process."""

    def __init__(self, config: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: config["threads"]]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        # Whole GiB, an upper bound; what is taken is set in blocks below, as many tokens as zerodrift has.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(config["kv_bytes"] // 2**30 + 1))
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm

        self._vllm = vllm
        self._block = 128
        self._eager: bool = config.get("eager", False)
        self._model = vllm.LLM(
            config["model"],
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=config["max_length"],
            block_size=self._block,
            # One block more than the tokens need: vLLM keeps one empty.
            num_gpu_blocks_override=config["kv_tokens"] // self._block + 1,
            enable_prefix_caching=True,
            enforce_eager=self._eager,
            disable_log_stats=True,
            seed=0,
        )

    def facts(self) -> dict[str, Any]:
        """Versions and settings."""
        import torch

        return {
            "vllm": self._vllm.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "compiled": not self._eager,
        }

    def run(self, job: Job) -> list[Sample]:
        """One call of ``generate``. No seeds of requests: vLLM is as fast as it can be."""
        sampling = self._vllm.SamplingParams(
            n=job.samples, temperature=1.0, max_tokens=job.new_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        samples: list[Sample] = []
        for result in self._model.generate(prompts, sampling, use_tqdm=False):
            for output in result.outputs:
                ids = list(output.token_ids)
                steps = zip(ids, output.logprobs, strict=True)
                samples.append((ids, [step[token].logprob for token, step in steps]))
        return samples


if __name__ == "__main__":
    serve(VllmEngine)
