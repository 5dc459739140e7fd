"""Training attention for ordinary Hugging Face calls: packed rows or padded batches through a kernel set.

Sequences are found in what the call passes: real tokens from the attention mask, and a new sequence wherever positions
do not go on by one. An all-ones mask beside packed positions therefore hides no border. Every sequence must start at
position 0, as it did in the rollout; a left-padded row whose positions count its pads is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rollout.attention import interface_attention
from rollout.errors import InvalidRequest, UnsupportedFeature
from rollout.kernels.base import KernelSet

INTERFACE_NAME = "zerodrift_train"
"""``attn_implementation`` of an aligned trainer; in verl: ``model.override_config.attn_implementation``."""
KERNELS_ATTRIBUTE = "_zerodrift_kernels"
"""Set on every attention module by ``align``."""


class RowsStep:
    """Attention metadata of one padded or packed call: which rows are real, and where their sequences begin."""

    def __init__(self, kernels: KernelSet, rows: torch.Tensor | None, cu_seqlens: torch.Tensor) -> None:
        self._kernels = kernels
        self._rows = rows
        """int64 [T] flat indices of real tokens; None: all of them"""
        self._cu_seqlens = cu_seqlens

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [B * S, H, D], k and v [B * S, H_kv, D] -> [B * S, H, D]; rows that are padding are zero."""
        rows = self._rows
        if rows is not None:
            q_rows, k_rows, v_rows = q[rows], k[rows], v[rows]
        else:
            q_rows, k_rows, v_rows = q, k, v
        out = self._kernels.attention_varlen(
            q_rows, k_rows, v_rows, cu_seqlens_q=self._cu_seqlens, cu_seqlens_k=self._cu_seqlens, softmax_scale=scale
        )
        return out if rows is None else torch.zeros_like(q).index_put((rows,), out)


def sequence_bounds(
    shape: tuple[int, int], positions: torch.Tensor | None, mask: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Real rows (int64 [T] flat, None: all) and cu_seqlens (int32 [N + 1]) of a batch [B, S].

    Raises:
        UnsupportedFeature: a sequence that does not start at position 0, or a mask that is not [B, S].
        InvalidRequest: no real token.
    """
    b, s = shape
    if positions is None:
        positions = torch.arange(s, device=device)[None].expand(b, s)
    elif positions.dim() == 2 and positions.size(0) in (1, b) and positions.size(1) == s:
        positions = positions.expand(b, s)
    else:
        raise UnsupportedFeature(f"position_ids {tuple(positions.shape)} do not fit a batch of {b} rows of {s}")
    flat = positions.reshape(-1)
    begins = torch.ones(b, s, dtype=torch.bool, device=device)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    rows: torch.Tensor | None = None
    if mask is not None:
        if mask.shape != (b, s):
            raise UnsupportedFeature(f"attention mask {tuple(mask.shape)} is not a padding mask [{b}, {s}]")
        real = _real(mask)
        # A token after a pad begins a sequence, whatever its position says.
        begins[:, 1:] |= ~real[:, :-1]
        if not bool(real.all()):
            rows = torch.nonzero(real.reshape(-1))[:, 0]
            flat, begins = flat[rows], begins.reshape(-1)[rows]
    starts = torch.nonzero(begins.reshape(-1))[:, 0]
    if flat.numel() == 0:
        raise InvalidRequest("the batch has no real token")
    if bool((flat[starts] != 0).any()):
        bad = int(flat[starts][flat[starts] != 0][0])
        raise UnsupportedFeature(
            f"a sequence starts at position {bad}; the rollout started it at 0. Pass position_ids that count real "
            "tokens only (cumsum of the mask minus one)"
        )
    end = torch.tensor([flat.numel()], device=starts.device)
    return rows, torch.cat((starts, end)).to(torch.int32)


def _real(mask: torch.Tensor) -> torch.Tensor:
    """A padding mask as bool [B, S].

    Raises:
        UnsupportedFeature: numbers of packed sequences (1, 2, ...), which as bool would see each other, and additive
            masks, where 0 keeps a token.
    """
    real = mask.bool()
    if mask.dtype != torch.bool and bool((mask != real).any()):
        odd = mask[mask != real][0].item()
        raise UnsupportedFeature(
            f"the attention mask holds {odd}; a padding mask is 1 for real tokens and 0 for pads. Packed sequences are "
            "told by position_ids that start again at 0"
        )
    return real


def training_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    position_ids: torch.Tensor | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [B, H, S, D], key and value [B, H_kv, S, D] -> ([B, S, H, D], None).

    Raises:
        UnsupportedFeature: masks, windows, dropout and the like that the kernel sets do not support.
    """
    kernels = getattr(module, KERNELS_ATTRIBUTE, None)
    if kernels is None:
        raise InvalidRequest(
            f"attn_implementation={INTERFACE_NAME} without alignment; enter trainer_bridge.align(model), or set "
            "verl's model.external_lib=trainer_bridge.verl.align"
        )
    b, _, s, _ = query.shape
    rows, cu_seqlens = sequence_bounds((b, s), position_ids, attention_mask, query.device)
    # What else the call carries is checked where the rollout's calls are checked.
    out, _ = interface_attention(
        module,
        query.transpose(0, 1).reshape(1, query.size(1), b * s, -1),
        key.transpose(0, 1).reshape(1, key.size(1), b * s, -1),
        value.transpose(0, 1).reshape(1, value.size(1), b * s, -1),
        None,
        scaling=scaling,
        attention_step=RowsStep(kernels, rows, cu_seqlens),
        **extra,
    )
    return out.reshape(b, s, query.size(1), -1), None


def padding_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """transformers' mask signature: the padding mask [B, S] itself; causality is the kernel's."""
    return attention_mask


def register_training_interface() -> str:
    """Make the attention known to transformers; returns its name. Idempotent."""
    AttentionInterface.register(INTERFACE_NAME, training_attention)
    AttentionMaskInterface.register(INTERFACE_NAME, padding_mask)
    return INTERFACE_NAME
