"""transformers' own ``generate`` in zerodrift's environment: one left-padded batch, SDPA, logits kept for log-probs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.drivers.channel import Job, Sample, serve


class HuggingFaceEngine:
    """One model, one batch a job."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(config["threads"])
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            config["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def facts(self) -> dict[str, Any]:
        """Versions and settings."""
        return {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "attention": "sdpa",
        }

    @torch.no_grad()
    def run(self, job: Job) -> list[Sample]:
        """Pad on the left, generate past EOS, take the log-probs of what was drawn from the kept logits."""
        torch.manual_seed(job.seed)
        longest = max(len(prompt) for prompt in job.prompts)
        ids = torch.zeros(len(job.prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(job.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=job.new_tokens,
            num_return_sequences=job.samples,
            # No EOS: all continuations have the same length, and no processor has to bar it.
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        out = self._model.generate(ids, attention_mask=mask, generation_config=settings)
        tokens = out.sequences[:, longest:]
        logprobs = [
            torch.log_softmax(logits.float(), -1).gather(1, tokens[:, step, None])
            for step, logits in enumerate(out.logits)
        ]
        return list(zip(tokens.tolist(), torch.cat(logprobs, 1).tolist(), strict=True))


if __name__ == "__main__":
    serve(HuggingFaceEngine)
