"""What an ordinary trainer would have seen: the same weights and tokens, padded batches, SDPA, no invariant mode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollout.logprobs import policy_logprobs
from rollout.model import SharedModel
from rollout.types import Float32Array
from trainer_bridge.forward import TrainingSample, pack


class OrdinaryTrainer:
    """A second instance of the architecture with transformers' own attention; shares the trainer's parameters."""

    def __init__(self, model: SharedModel) -> None:
        config = type(model.hf.config).from_dict(model.hf.config.to_dict())
        with torch.device("meta"):
            self._hf = AutoModelForCausalLM.from_config(config, dtype=model.spec.dtype, attn_implementation="sdpa")
        self._hf.eval()
        self._spec = model.spec
        for name, parameter in model.parameters():
            module_name, _, leaf = name.rpartition(".")
            setattr(self._hf.get_submodule(module_name), leaf, torch.nn.Parameter(parameter.data, requires_grad=False))
        self._hf.tie_weights()
        self._copy_buffers(model)

    def _copy_buffers(self, model: SharedModel) -> None:
        for name, buffer in model.hf.named_buffers():
            module_name, _, leaf = name.rpartition(".")
            self._hf.get_submodule(module_name).register_buffer(leaf, buffer, persistent=False)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample], *, micro_batch: int, threads: int) -> list[Float32Array]:
        """Log-probs of every generated token, per sample, as right-padded micro-batches give them."""
        torch.set_num_threads(threads)
        results: list[Float32Array] = []
        for start in range(0, len(samples), micro_batch):
            part = samples[start : start + micro_batch]
            batch = pack(part)
            sizes = np.diff(batch.cu_seqlens.numpy())
            width = int(sizes.max())
            ids = torch.zeros(len(part), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for b, (row, size) in enumerate(zip(batch.input_ids.split(sizes.tolist()), sizes, strict=True)):
                ids[b, :size], mask[b, :size] = row, 1
            hidden = self._hf.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            kept = torch.cat([hidden[b, :size] for b, size in enumerate(sizes)])[batch.rows]
            logits = self._hf.get_output_embeddings()(kept)
            out = policy_logprobs(logits, batch.targets, batch.temperatures, self._spec.vocab_size)
            results += [t.numpy() for t in out.split(list(batch.lengths))]
        return results
