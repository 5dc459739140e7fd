"""verl's ``model.external_lib``: makes its FSDP actor (and reference) compute with the rollout's bits.

Importing it changes verl's FSDP engine in this process, in four places: a built module is aligned before FSDP wraps
it; every batch, forward and backward, runs in the kernel set's invariant mode, and scored ones pass the gates of
``actor_gate``; where the rollout sent row digests they are taken here too; and logits become log-probs by C1. The last
replaces two steps of verl's unfused path: the temperature, which verl rounds to the logits' dtype (0.7 becomes
0.69921875 in bfloat16), and log-softmax over logits in that dtype. Here both are float32, as in the rollout.

Settings come from ``ZERODRIFT_KERNELS__NAME`` and ``ZERODRIFT_ENGINE__PAGE_SIZE``, as for the service; the handshake
shows a difference. Not covered, and refused: fused kernels, Ulysses sequence parallelism, Liger kernels, LoRA that is
not merged. Megatron and VeOmni engines are not touched: the handshake then says that no model was aligned.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch

from rollout.config import load_settings
from rollout.errors import ParityError, UnsupportedFeature
from rollout.kernels.base import KernelSet
from rollout.kernels.registry import resolve_kernels
from rollout.logprobs import row_digests
from trainer_bridge.aligned import aligned_logprobs, aligned_manifest, install
from trainer_bridge.aligned_attention import register_training_interface
from trainer_bridge.batches import DIGESTS
from trainer_bridge.verl.actor_gate import check_scored_batch, wants_digests
from trainer_bridge.verl.align_state import aligned_process, remember

log = logging.getLogger(__name__)
_MARK = "_zerodrift_aligned"


def trainer_kernels() -> KernelSet:
    """The kernel set that settings and platform name."""
    settings = load_settings()
    return resolve_kernels(settings.kernels.name, page_size=settings.engine.page_size)


def scale_logits(logits: torch.Tensor, temperature: torch.Tensor, *, is_unit_temperature: bool) -> torch.Tensor:
    """verl's ``_scale_logits_by_temperature`` by C1: float32 logits over a float32 temperature; nothing is rounded."""
    rows = logits.to(torch.float32)
    return rows if is_unit_temperature else rows / temperature.to(torch.float32)


def logprobs_from_logits(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """verl's function by C1: scaled float32 logits [..., V], labels [...] -> float32 [...] nats."""
    if logits.dtype != torch.float32:
        raise ParityError(f"logits arrived as {logits.dtype}: verl's temperature step was not replaced")
    rows, ids = logits.reshape(-1, logits.size(-1)), labels.reshape(-1)
    ones = torch.ones(rows.size(0), dtype=torch.float32, device=rows.device)
    return aligned_logprobs(rows, ids, ones, rows.size(1)).reshape(labels.shape)


def check_engine(engine: Any) -> None:
    """Refuse by name what is not aligned.

    Raises:
        UnsupportedFeature: Ulysses, fused or Liger kernels.
    """
    wanted = {
        "ulysses_sequence_parallel_size > 1": engine.engine_config.ulysses_sequence_parallel_size > 1,
        "model.use_fused_kernels": bool(engine.model_config.use_fused_kernels),
        "model.use_liger": bool(engine.model_config.use_liger),
        "model.lora_rank": int(engine.model_config.lora_rank) > 0,
        "QAT": bool(getattr(engine, "_qat_enabled", False)),
    }
    asked = [name for name, present in wanted.items() if present]
    if asked:
        raise UnsupportedFeature(
            f"{', '.join(asked)}: the aligned actor does not cover it, so log-probs would differ from the rollout's; "
            "turn it off, or leave trainer_bridge.verl.align out and measure with handshake=audit"
        )


def compute_dtype(engine: Any) -> torch.dtype:
    """What parameters are cast to in verl's forward: ``mixed_precision.param_dtype``, by default bfloat16."""
    from verl.utils.torch_dtypes import PrecisionType

    mixed = engine.engine_config.mixed_precision
    dtype: torch.dtype = PrecisionType.to_dtype("bf16" if mixed is None else mixed.get("param_dtype", "bf16"))
    return dtype


def apply() -> None:
    """Change verl's FSDP engine, once a process.

    Raises:
        ParityError: verl's engine lacks a function that has to be replaced.
    """
    from verl.workers.engine.fsdp import transformer_impl

    register_training_interface()
    if getattr(transformer_impl, _MARK, False):
        return
    for name in ("_scale_logits_by_temperature", "logprobs_from_logits", "FSDPEngine", "FSDPEngineWithLMHead"):
        if not hasattr(transformer_impl, name):
            raise ParityError(f"verl's FSDP engine has no {name}; this verl is not the one that was aligned (0.9.1)")
    transformer_impl._scale_logits_by_temperature = scale_logits
    transformer_impl.logprobs_from_logits = logprobs_from_logits
    engine = transformer_impl.FSDPEngine
    engine._build_module = _aligned_build(engine._build_module)
    engine.forward_backward_batch = _in_invariant_mode(engine.forward_backward_batch)
    scoring = transformer_impl.FSDPEngineWithLMHead
    scoring.prepare_model_outputs = _with_digests(scoring.prepare_model_outputs)
    setattr(transformer_impl, _MARK, True)
    log.info("verl's FSDP engine is aligned with the rollout")


def _aligned_build(original: Any) -> Any:
    @functools.wraps(original)
    def build(self: Any) -> Any:
        check_engine(self)
        module = original(self)
        if self.model_config.model_type != "language_model":
            return module
        kernels, dtype = trainer_kernels(), compute_dtype(self)
        install(module, kernels, dtype)
        remember(aligned_manifest(module, kernels, dtype))
        return module

    return build


def _in_invariant_mode(original: Any) -> Any:
    @functools.wraps(original)
    def batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        with trainer_kernels().invariant_mode():
            output = original(self, data, loss_function, forward_only=forward_only)
        if forward_only:
            check_scored_batch(self, data, output)
        elif self.model_config.model_type == "language_model":
            # An optimizer step follows: what the rollout serves is no longer what this process holds.
            aligned_process().served_step = None
        return output

    return batch


def _with_digests(original: Any) -> Any:
    @functools.wraps(original)
    def outputs(self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        found = None
        if not torch.is_grad_enabled() and wants_digests(micro_batch):
            if not output_args or "input_ids_rmpad_rolled" not in output_args:
                raise UnsupportedFeature(
                    "row digests in the actor need actor_rollout_ref.model.use_remove_padding=true"
                )
            logits = output.logits.squeeze(0)
            logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            # Before the original, which may scale in place.
            digests = row_digests(logits, self.module.config.vocab_size).view(np.int64)
            found = self._gather_and_unpad_packed(torch.from_numpy(digests), output_args["pad_size"])
        made = original(self, output, output_args, micro_batch, logits_processor_func)
        if found is not None:
            made[DIGESTS] = torch.nested.nested_tensor_from_jagged(found, micro_batch["input_ids"].offsets().cpu())
        return made

    return outputs


apply()
