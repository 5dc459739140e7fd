"""Every fused kernel against the Hugging Face modules it stands for, in invariant mode, by bits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from rollout.kernels.base import KVLayout
from rollout.kernels.cpu import fused
from rollout.kernels.cpu.arrays import array_of
from rollout.kernels.cpu.invariant import invariant_mode
from rollout.kernels.cpu.store import CpuKVStore

DTYPES = [torch.bfloat16, torch.float32]
EPS = np.float32(1e-5)


def _norm(size: int, dtype: torch.dtype) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(size, 1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.5)
    return norm


def _rows(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 64, 65, 100, 576, 1000])
def test_rms_norm(columns: int, dtype: torch.dtype) -> None:
    norm, x = _norm(columns, dtype), _rows(37, columns, dtype)
    with invariant_mode():
        wanted = norm(x)
    for rows in (1, 2, 37):
        out = torch.empty(rows, columns, dtype=dtype)
        fused.rms_norm(array_of(x[:rows]), array_of(norm.weight), EPS, array_of(out))
        assert torch.equal(out, wanted[:rows])


def test_rms_norm_in_another_order_differs() -> None:
    """Negative control: torch's own mean, outside invariant mode, sums in another order."""
    norm, x = _norm(1000, torch.float32), _rows(64, 1000, torch.float32)
    out = torch.empty_like(x)
    fused.rms_norm(array_of(x), array_of(norm.weight), EPS, array_of(out))
    assert not torch.equal(out, norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    norm, residual, x = _norm(576, dtype), _rows(9, 576, dtype, 1), _rows(9, 576, dtype, 2)
    with invariant_mode():
        total = residual + x
        wanted = norm(total)
    out = torch.empty_like(x)
    fused.add_rms_norm(array_of(residual), array_of(x), array_of(norm.weight), EPS, array_of(out))
    assert torch.equal(residual, total)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [16, 96, 1000, 1536])
def test_silu_mul(inner: int, dtype: torch.dtype) -> None:
    gate_up = _rows(5, 2 * inner, dtype)
    gate_up[0, :4] = torch.tensor([0.0, -0.0, 200.0, -200.0], dtype=dtype)
    out = torch.empty(5, inner, dtype=dtype)
    fused.silu_mul(array_of(gate_up), array_of(out))
    with invariant_mode():
        wanted = torch.nn.functional.silu(gate_up[:, :inner]) * gate_up[:, inner:]
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_write(dtype: torch.dtype, normed: bool) -> None:
    """Heads, their norms, rotation and the pages written, against the modules' own steps."""
    sizes = SimpleNamespace(rows=7, heads=4, kv=2, dim=16, page=16)
    qkv = _rows(sizes.rows, (sizes.heads + 2 * sizes.kv) * sizes.dim, dtype)
    angles = torch.rand(40, sizes.dim // 2, generator=torch.Generator().manual_seed(3)).repeat(1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.tensor([3, 4, 5, 20, 21, 0, 39])
    slots = torch.tensor([16, 17, 31, 32, 33, 0, 47])
    store = CpuKVStore(KVLayout(1, 3, sizes.page, sizes.kv, sizes.dim, dtype))
    norms = (_norm(sizes.dim, dtype), _norm(sizes.dim, dtype)) if normed else (None, None)
    weights = [array_of(n.weight if n is not None else torch.empty(0, dtype=dtype)) for n in norms]
    rotated = torch.empty(sizes.rows, sizes.heads, sizes.dim, dtype=dtype)
    fused.rope_and_write(
        array_of(qkv), array_of(cos), array_of(sin), positions.numpy(), slots.numpy(), *weights, EPS,
        *store.arrays(0), array_of(rotated),
    )  # fmt: skip
    q, k, v = qkv.split([sizes.heads * sizes.dim, sizes.kv * sizes.dim, sizes.kv * sizes.dim], 1)
    q, k = q.view(sizes.rows, sizes.heads, -1), k.view(sizes.rows, sizes.kv, -1)
    with invariant_mode():
        if norms[0] is not None and norms[1] is not None:
            q, k = norms[0](q), norms[1](k)
        q, k = apply_rotary_pos_emb(q[None], k[None], cos[positions][None], sin[positions][None], unsqueeze_dim=2)
    assert torch.equal(rotated, q[0])
    pages, offsets = slots // sizes.page, slots % sizes.page
    assert torch.equal(store.keys[0][pages, :, :, offsets], k[0])
    assert torch.equal(store.values[0][pages, :, offsets], v.view(sizes.rows, sizes.kv, -1))


def test_mean_rows_is_the_mean_of_invariant_mode() -> None:
    x = _rows(5, 1000, torch.float32)
    out = np.empty(5, np.float32)
    fused.mean_rows(x.numpy(), out)
    with invariant_mode():
        assert torch.equal(torch.from_numpy(out), x.mean(-1))
        assert torch.equal(torch.from_numpy(out)[:, None], x.mean(-1, keepdim=True))
    assert torch.allclose(torch.from_numpy(out), x.double().mean(-1).float(), rtol=1e-5)
