"""Attention written again for the tests: dense in float64, and in the kernel's stated order of float32 steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rollout.kernels.base import KVLayout
from rollout.kernels.cpu.kernel_set import CpuKernelSet, CpuKVStore

F32 = np.float32
Float32 = npt.NDArray[np.float32]


def rows(seed: int, length: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[length, heads, dim] standard normal, from numpy."""
    values = np.random.default_rng(seed).standard_normal((length, heads, dim)).astype(np.float32)
    return torch.from_numpy(values).to(dtype)


def edges(lengths: Sequence[int]) -> torch.Tensor:
    """int32 cu_seqlens"""
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def visible(q_len: int, k_len: int, causal: bool) -> torch.Tensor:
    """bool [q, k], bottom-right aligned."""
    last = torch.arange(q_len)[:, None] + (k_len - q_len)
    return torch.arange(k_len)[None] <= last if causal else torch.ones(q_len, k_len, dtype=torch.bool)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention of one sequence: out [T, H, D] and lse [H, T]; differentiable."""
    group = q.shape[1] // k.shape[1]
    q64, k64, v64 = (x.double().transpose(0, 1) for x in (q, k, v))
    k64, v64 = k64.repeat_interleave(group, 0), v64.repeat_interleave(group, 0)
    scores = (q64 @ k64.transpose(1, 2) * scale).masked_fill(~visible(len(q), len(k), causal), -torch.inf)
    lse = scores.logsumexp(-1)
    probs = torch.where(scores == -torch.inf, 0.0, (scores - lse[..., None]).exp())
    return (probs @ v64).transpose(0, 1), lse


# ---- the stated order, step by step -----------------------------------------------------------------------------


def exp_steps(x: Float32) -> Float32:
    """Cephes expf in float32 numpy steps: every operation rounds once."""
    coefficients = [
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ]
    c = np.clip(x, F32(-87), F32(88))
    n = (c * F32(1.4426950408889634) + F32(12582912)) - F32(12582912)
    r = (c - n * F32(0.693359375)) - n * F32(-2.12194440e-4)
    p = np.full_like(r, F32(coefficients[0]))
    for coefficient in coefficients[1:]:
        p = p * r + F32(coefficient)
    y = (p * (r * r) + r) + F32(1)
    result: Float32 = np.where(x < F32(-87), F32(0), np.ldexp(y, n.astype(np.int32)).astype(np.float32))
    return result


def fused_multiply_add(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Float32:
    """a * b + c, rounded once: exact product in float64, sum rounded to odd there (Boldo & Melquiond 2008)."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    rest = (product - (total - part)) + (addend - part)
    bits = np.atleast_1d(total).view(np.int64).copy()
    rest = np.broadcast_to(rest, bits.shape)
    even = (rest != 0) & (bits & 1 == 0)
    bits[even] += np.where((rest > 0) == (np.atleast_1d(total) > 0), 1, -1)[even]
    result: Float32 = bits.view(np.float64).astype(np.float32).reshape(np.shape(total))
    return result


def by_the_book(query: Float32, keys: Float32, values: Float32, page: int, scale: float) -> Float32:
    """One row: query [D], keys and values [n, D] -> [D], in the order that the kernel promises."""
    top, sums, acc = F32(-np.inf), np.zeros(16, np.float32), np.zeros(len(query), np.float32)
    for start in range(0, len(keys), page):
        block, scores = keys[start : start + page], np.full(page, F32(-np.inf))
        dots = np.zeros(len(block), np.float32)
        for d in range(len(query)):
            dots = fused_multiply_add(query[d], block[:, d], dots)
        scores[: len(block)] = dots * F32(scale)
        new_top = max(top, scores.max())
        if new_top > top:
            shrink = F32(0) if top == -np.inf else exp_steps(np.array([top - new_top], np.float32))[0]
            sums, acc = sums * shrink, acc * shrink
        top = new_top
        probs = exp_steps(scores - top)
        for lane_start in range(0, page, 16):
            sums = sums + probs[lane_start : lane_start + 16]
        for j in range(len(block)):
            acc = fused_multiply_add(probs[j], values[start + j], acc)
    total = F32(0)
    for lane in sums:
        total = total + lane
    return acc / total


# ---- calls ------------------------------------------------------------------------------------------------------


def store_of(
    kernels: CpuKernelSet,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    seed: int | None = None,
    poison: bool = True,
) -> tuple[CpuKVStore, torch.Tensor]:
    """A cache with spare pages, everything unused NaN, pages in random order; and its page table int32 [B, max]."""
    page = kernels.page_size
    counts = [-(-len(k) // page) for k in keys]
    total = sum(counts) + 3
    store = kernels.allocate_kv(KVLayout(1, total, page, keys[0].shape[1], keys[0].shape[2], keys[0].dtype))
    if poison:
        store.poison()
    free = list(range(total))
    if seed is not None:
        random.Random(seed).shuffle(free)
    table = torch.full((len(keys), max(max(counts), 1)), 10**6, dtype=torch.int32)
    for b, (key, value, count) in enumerate(zip(keys, values, counts, strict=True)):
        pages = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
        table[b, :count] = pages.int()
        position = torch.arange(len(key))
        store.write(0, key, value, pages[position // page] * page + position % page if count else position)
    return store, table


def paged(
    kernels: CpuKernelSet,
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    scale: float = 0.25,
    causal: bool = True,
    seed: int | None = None,
) -> torch.Tensor:
    """``attention_with_kvcache`` of whole sequences whose last rows are the queries."""
    store, table = store_of(kernels, keys, values, seed=seed)
    return kernels.attention_with_kvcache(
        torch.cat(list(queries)),
        store,
        0,
        page_table=table,
        cache_seqlens=torch.tensor([len(k) for k in keys], dtype=torch.int32),
        cu_seqlens_q=edges([len(q) for q in queries]),
        softmax_scale=scale,
        causal=causal,
    )


def varlen(
    kernels: CpuKernelSet,
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    scale: float = 0.25,
    causal: bool = True,
) -> torch.Tensor:
    """``attention_varlen`` of the same."""
    return kernels.attention_varlen(
        torch.cat(list(queries)),
        torch.cat(list(keys)),
        torch.cat(list(values)),
        cu_seqlens_q=edges([len(q) for q in queries]),
        cu_seqlens_k=edges([len(k) for k in keys]),
        softmax_scale=scale,
        causal=causal,
    )
