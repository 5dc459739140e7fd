"""Gradients of the training attention against autograd through a dense float64 reference."""

from __future__ import annotations

import pytest
import torch

from rollout.kernels.cpu.kernel_set import cpu_kernels
from tests.rollout.kernels.dense import dense, edges, rows, varlen

Tensors = list[torch.Tensor]


def leaves(lengths: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensors, Tensors, Tensors, torch.Tensor]:
    q = [rows(i, a, 4, 20, dtype).requires_grad_() for i, (a, _) in enumerate(lengths)]
    k, v = ([rows(10 * s + i, b, 2, 20, dtype).requires_grad_() for i, (_, b) in enumerate(lengths)] for s in (1, 2))
    return q, k, v, rows(99, sum(a for a, _ in lengths), 4, 20, dtype)


def gradients(lengths: list[tuple[int, int]], dtype: torch.dtype, causal: bool = True) -> tuple[Tensors, Tensors]:
    """(ours, reference), one tensor a leaf."""
    q, k, v, weight = leaves(lengths, dtype)
    flat = [*q, *k, *v]
    ours = torch.autograd.grad((varlen(cpu_kernels(16), q, k, v, causal=causal) * weight).float().sum(), flat)
    reference = torch.cat([dense(*qkv, 0.25, causal)[0] for qkv in zip(q, k, v, strict=True)])
    expected = torch.autograd.grad((reference * weight.double()).sum(), flat)
    return list(ours), list(expected)


LENGTHS = [(1, 1), (5, 5), (3, 40), (300, 300), (17, 16)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients(dtype: torch.dtype, bound: float, causal: bool) -> None:
    """Bound: a few hundred float32 roundings of terms of size 1; in bfloat16 the output saved for backward and the
    gradient are each rounded at 2^-8, of values up to about 4."""
    ours, expected = gradients(LENGTHS, dtype, causal)
    for mine, right in zip(ours, expected, strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - right.double()).abs().max()) < bound * max(1.0, float(right.abs().max()))
    # Control: the other mask's gradients lie outside the bound.
    others, _ = gradients(LENGTHS, dtype, not causal)
    assert any(float((o.double() - r.double()).abs().max()) > bound * 4 for o, r in zip(others, expected, strict=True))


def test_rows_and_keys_that_do_not_meet_have_no_gradient() -> None:
    q, k, v, weight = leaves([(5, 2), (4, 4)], torch.float32)
    grads = torch.autograd.grad((varlen(cpu_kernels(16), q, k, v) * weight).sum(), [*q, *k, *v])
    assert torch.equal(grads[0][:3], torch.zeros(3, 4, 20))
    assert all(bool(g.isfinite().all()) for g in grads)
    assert bool((grads[1][1:] != 0).any())


def test_a_sequence_gets_no_gradient_from_its_neighbour() -> None:
    """The same bits packed or alone: sequences are handled one at a time."""
    q, k, v, weight = leaves([(40, 40), (300, 300)], torch.float32)
    packed = torch.autograd.grad((varlen(cpu_kernels(16), q, k, v) * weight).sum(), [q[0], k[0], v[0]])
    alone = torch.autograd.grad((varlen(cpu_kernels(16), q[:1], k[:1], v[:1]) * weight[:40]).sum(), [q[0], k[0], v[0]])
    assert all(torch.equal(a, b) for a, b in zip(packed, alone, strict=True))


def test_forward_is_the_same_with_and_without_gradients() -> None:
    q, k, v, _ = leaves([(40, 40)], torch.float32)
    with_grad = varlen(cpu_kernels(16), q, k, v)
    assert with_grad.requires_grad
    with torch.no_grad():
        assert torch.equal(varlen(cpu_kernels(16), q, k, v), with_grad)


def test_non_contiguous_inputs() -> None:
    base = rows(0, 4, 40, 20).transpose(0, 1).contiguous().transpose(0, 1).transpose(0, 1)  # [40, 4, 20], strided
    k, v = rows(1, 40, 2, 20), rows(2, 40, 2, 20)
    assert not base.transpose(1, 2).is_contiguous()
    strided = torch.empty(40, 8, 20)[:, ::2]
    strided.copy_(base)
    cu = edges([40])
    kernels = cpu_kernels(16)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "softmax_scale": 0.25}
    assert torch.equal(
        kernels.attention_varlen(strided, k, v, **options), kernels.attention_varlen(base, k, v, **options)
    )
