"""An ordinary Hugging Face or FSDP model whose forward gives the rollout's bits.

Four things are put in place while aligned: the kernel set's attention, row-invariant operations, one cast of each
parameter to the served dtype (to nearest even, where the module uses it; masters keep theirs), and no autocast inside,
which would cast a second time and elsewhere. The backward pass is ordinary autograd. What the model returns stays what
Hugging Face returns; log-probs come from ``aligned_logprobs``, the rollout's own function (C1).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rollout.errors import UnsupportedFeature
from rollout.kernels.base import KernelSet
from rollout.kernels.registry import resolve_kernels
from rollout.logprobs import policy_logprobs
from rollout.manifest import build_manifest
from rollout.model import ModelSpec, SharedModel, check_supported
from rollout.multimodal import is_multimodal
from trainer_bridge.aligned_attention import KERNELS_ATTRIBUTE, register_training_interface
from trainer_bridge.forward import HEAD_ROWS

Undo = Callable[[], None]


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside an FSDP (version 1) wrapper; anything else as it is."""
    return getattr(model, "_fsdp_wrapped_module", model)


def spec_of(hf: Any, dtype: torch.dtype) -> ModelSpec:
    """Sizes of a loaded model."""
    config = hf.config
    heads = int(config.num_attention_heads)
    return ModelSpec(
        name=str(config.model_type),
        vocab_size=int(config.vocab_size),
        context_length=int(config.max_position_embeddings),
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(config.num_key_value_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        eos_token_ids=(),
        dtype=dtype,
        tied=bool(config.tie_word_embeddings),
    )


def aligned_manifest(model: Any, kernels: KernelSet, dtype: torch.dtype) -> dict[str, str]:
    """Parity manifest (C5) of an aligned model, to be compared with the service's."""
    manifest = build_manifest(SharedModel(unwrapped(model), kernels, spec_of(unwrapped(model), dtype)))
    # The head's parameter may be a float32 master; what multiplies is its cast.
    return manifest | {"dtype.lm_head": manifest["dtype.model"]}


@contextlib.contextmanager
def align(
    model: Any, *, kernels: KernelSet | str = "auto", page_size: int = 128, dtype: torch.dtype | None = None
) -> Iterator[dict[str, str]]:
    """Forward and backward of ``model`` with the rollout's bits inside the block; yields its parity manifest.

    Args:
        model: a Hugging Face causal LM, plain or under FSDP (1 or 2).
        kernels: a kernel set, or the name of one.
        page_size: KV page of the rollout; attention reduces in blocks of it.
        dtype: what the rollout serves; None: the dtype of the parameters.

    Raises:
        UnsupportedFeature: an architecture, option or dropout that is not proven bit-equal.
    """
    kernel_set = resolve_kernels(kernels, page_size=page_size) if isinstance(kernels, str) else kernels
    dtype = dtype or next(unwrapped(model).parameters()).dtype
    undo = install(model, kernel_set, dtype)
    try:
        with kernel_set.invariant_mode():
            yield aligned_manifest(model, kernel_set, dtype)
    finally:
        undo()


def install(model: Any, kernels: KernelSet, dtype: torch.dtype) -> Undo:
    """Attention, casts and autocast guard, without the invariant mode; returns what takes them out again."""
    hf = unwrapped(model)
    if is_multimodal(hf.config):
        raise UnsupportedFeature(
            f"a model of type {hf.config.model_type} with a vision tower cannot be aligned in place; load it by "
            "rollout.model.load_model and score with trainer_bridge.forward.TrainingForward"
        )
    check_supported(hf.config, kernels, dtype)
    _check_dropout(hf)
    undo = [_use_attention(hf, kernels), _guard_autocast(hf), *(_cast(m, dtype) for m in _with_parameters(hf))]

    def undo_all() -> None:
        for step in reversed(undo):
            step()

    return undo_all


def aligned_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """C1 in pieces: logits [N, >= V], token_ids int64 [N], temperatures float32 [N] -> float32 [N] nats.

    At most ``HEAD_ROWS`` rows exist in float32 at a time; a row's bits do not depend on the piece it is in.
    """

    def piece(rows: torch.Tensor, ids: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return policy_logprobs(rows, ids, t, vocab_size)

    parts: list[torch.Tensor] = []
    for start in range(0, logits.size(0), HEAD_ROWS):
        here = slice(start, start + HEAD_ROWS)
        arguments = logits[here], token_ids[here], temperatures[here]
        kept = logits.requires_grad and torch.is_grad_enabled()
        parts.append(checkpoint(piece, *arguments, use_reentrant=False) if kept else piece(*arguments))
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)


def _check_dropout(hf: Any) -> None:
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        if float(getattr(hf.config, name, 0.0) or 0.0):
            raise UnsupportedFeature(
                f"{name} = {getattr(hf.config, name)}: dropout cannot repeat the rollout's forward; set it to 0"
            )


def _use_attention(hf: Any, kernels: KernelSet) -> Undo:
    before = hf.config._attn_implementation
    hf.config._attn_implementation = register_training_interface()
    modules = [m for m in hf.modules() if hasattr(m, "layer_idx") and hasattr(m, "q_proj")]
    for module in modules:
        setattr(module, KERNELS_ATTRIBUTE, kernels)

    def undo() -> None:
        hf.config._attn_implementation = before
        for module in modules:
            delattr(module, KERNELS_ATTRIBUTE)

    return undo


def _guard_autocast(hf: Any) -> Undo:
    original = hf.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type=next(hf.parameters()).device.type, enabled=False):
            return original(*args, **kwargs)

    hf.forward = forward

    def undo() -> None:
        # The class's own forward shows again.
        del hf.forward

    return undo


def _with_parameters(hf: Any) -> list[torch.nn.Module]:
    return [m for m in hf.modules() if any(True for _ in m.parameters(recurse=False))]


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> Undo:
    """Parameters of other dtypes stand as their casts while the module runs, also when checkpointing runs it again."""
    masters: list[dict[str, torch.nn.Parameter]] = []

    def before(_: torch.nn.Module, __: Any) -> None:
        held = {
            name: p
            for name, p in module._parameters.items()
            if p is not None and p.is_floating_point() and p.dtype != dtype
        }
        masters.append(held)
        for name, parameter in held.items():
            del module._parameters[name]
            module.__dict__[name] = parameter.to(dtype)

    def after(_: torch.nn.Module, __: Any, ___: Any) -> None:
        for name, parameter in masters.pop().items():
            del module.__dict__[name]
            module._parameters[name] = parameter

    handles = [
        module.register_forward_pre_hook(before, prepend=False),
        module.register_forward_hook(after, always_call=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
