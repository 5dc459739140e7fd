"""A row's bits depend on its own query and keys: not on batch, chunk, length of the call, pages, threads or poison."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rollout.kernels.cpu.kernel_set import CpuKernelSet, _attend, cpu_kernels
from tests.engines import torch_threads
from tests.rollout.kernels.dense import edges, paged, rows, store_of, varlen

LENGTH = 300
HEADS, KV_HEADS, DIM = 4, 2, 24
EDGES = {16: range(1, LENGTH + 1), 128: (1, 2, 63, 126, 127, 128, 129, 130, 254, 255, 256, 257, 258, 300)}


@pytest.fixture(params=[16, 128], ids=["page16", "page128"])
def kernels(request: pytest.FixtureRequest) -> CpuKernelSet:
    return cpu_kernels(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def qkv(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (rows(seed, LENGTH, h, DIM, request.param) for seed, h in enumerate(heads))
    return q, k, v


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def decode_all(kernels: CpuKernelSet, qkv: Inputs, lengths: list[int], seed: int | None = None) -> torch.Tensor:
    """One call with a decoding row per length, all reading the same pages."""
    q, k, v = qkv
    store, table = store_of(kernels, [k], [v], seed=seed)
    return kernels.attention_with_kvcache(
        q[[n - 1 for n in lengths]],
        store,
        0,
        page_table=table.expand(len(lengths), -1).contiguous(),
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        cu_seqlens_q=edges([1] * len(lengths)),
        softmax_scale=0.25,
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_decode_equals_training(kernels: CpuKernelSet, qkv: Inputs, threads: int) -> None:
    lengths = list(EDGES[kernels.page_size])
    with torch_threads(threads):
        full = varlen(kernels, *([x] for x in qkv))
        decoded = decode_all(kernels, qkv, lengths)
    assert torch.equal(decoded, full[[n - 1 for n in lengths]])
    # Control: one key fewer is another result on every row.
    shifted = decode_all(kernels, (qkv[0][1:], *qkv[1:]), lengths[:-1])
    assert not torch.equal(shifted, full[list(lengths[:-1])])


def test_decode_alone_equals_decode_in_a_batch(kernels: CpuKernelSet, qkv: Inputs) -> None:
    lengths = [1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300]
    together = decode_all(kernels, qkv, lengths)
    for i, length in enumerate(lengths):
        assert torch.equal(decode_all(kernels, qkv, [length])[0], together[i])


def test_every_prefix_equals_the_whole(kernels: CpuKernelSet, qkv: Inputs) -> None:
    """Prefill of n tokens for every n: the last row, and all before it, are those of the longest prefill."""
    full = varlen(kernels, *([x] for x in qkv))
    lengths = [*range(1, LENGTH + 1, 7), 16, 32, 128, 129, 256, 257]
    packed = varlen(kernels, *([x[:n] for n in lengths] for x in qkv))
    for part, n in zip(packed.split(lengths), lengths, strict=True):
        assert torch.equal(part, full[:n]), n


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 17, 31, 33, 100, 299, 300])
def test_chunks_equal_the_whole(kernels: CpuKernelSet, qkv: Inputs, chunk: int) -> None:
    q, k, v = qkv
    full = varlen(kernels, [q], [k], [v])
    starts = list(range(0, LENGTH, chunk))
    ends = [min(s + chunk, LENGTH) for s in starts]
    store, table = store_of(kernels, [k], [v], seed=chunk)
    out = kernels.attention_with_kvcache(
        q,
        store,
        0,
        page_table=table.expand(len(starts), -1).contiguous(),
        cache_seqlens=torch.tensor(ends, dtype=torch.int32),
        cu_seqlens_q=edges([e - s for s, e in zip(starts, ends, strict=True)]),
        softmax_scale=0.25,
    )
    assert torch.equal(out, full)


def test_pages_neighbours_and_threads_change_nothing(kernels: CpuKernelSet, qkv: Inputs) -> None:
    q, k, v = qkv
    alone = paged(kernels, [q[-3:]], [k], [v])
    rng = random.Random(0)
    for seed in range(4):
        mates = [rng.randint(1, LENGTH) for _ in range(5)]
        at = rng.randint(0, 5)
        lists = [[x[:n] for n in mates] for x in qkv]
        for own, mine in zip(lists, (q[-3:], k, v), strict=True):
            own.insert(at, mine)
        with torch_threads(1 + seed % 2):
            out = paged(kernels, *lists, seed=seed)
        first = sum(mates[:at])
        assert torch.equal(out[first : first + 3], alone)
    other = paged(kernels, [q[-3:]], [torch.cat((k[1:], k[:1]))], [v])
    assert not torch.equal(other, alone)


def test_poison_in_unused_slots_is_not_read(kernels: CpuKernelSet, qkv: Inputs) -> None:
    q, k, v = (x[:37] for x in qkv)
    outs = []
    for poison in (True, False):
        store, table = store_of(kernels, [k], [v], poison=poison)
        assert bool(store.keys.isnan().any()) == bool(store.values.isnan().any()) == poison
        outs.append(
            kernels.attention_with_kvcache(
                q,
                store,
                0,
                page_table=table,
                cache_seqlens=torch.tensor([37], dtype=torch.int32),
                cu_seqlens_q=edges([37]),
                softmax_scale=0.25,
            )
        )
    assert torch.equal(*outs) and bool(outs[0].isfinite().all())


def test_poison_in_a_used_slot_shows(kernels: CpuKernelSet, qkv: Inputs) -> None:
    """Negative control of the poison: the same NaN one slot earlier reaches every row that sees it."""
    q, k, v = (x[:37] for x in qkv)
    store, table = store_of(kernels, [k], [v])
    last_page, offset = int(table[0, 36 // kernels.page_size]), 36 % kernels.page_size
    store.values[0, last_page, :, offset] = torch.nan
    out = kernels.attention_with_kvcache(
        q,
        store,
        0,
        page_table=table,
        cache_seqlens=torch.tensor([37], dtype=torch.int32),
        cu_seqlens_q=edges([37]),
        softmax_scale=0.25,
    )
    assert bool(out[36].isnan().all()) and bool(out[:36].isfinite().all())


def split_in_two(kernels: CpuKernelSet, qkv: Inputs, length: int) -> torch.Tensor:
    """Flash-decoding: each half of the keys alone, then merged by their log-sum-exps; as right, in another order."""
    q, k, v = qkv
    half = length // 2
    parts = []
    for first, last in ((0, half), (half, length)):
        store, table = store_of(kernels, [k[first:last]], [v[first:last]])
        lengths = np.array([last - first], np.int32)
        parts.append(
            _attend(q[length - 1 : length].float(), store, 0, table.numpy(), lengths, edges([1]).numpy(), 0.25, False)
        )
    (left, left_lse), (right, right_lse) = parts
    share = torch.sigmoid(left_lse - right_lse).T[..., None]
    return (left * share + right * (1 - share)).to(q.dtype)


def test_an_attention_that_splits_keys_has_other_bits(kernels: CpuKernelSet) -> None:
    """In float32: one rounding to bfloat16 hides most of it from a single layer, not from a model."""
    q, k, v = (rows(seed, LENGTH, h, DIM) for seed, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    lengths = range(2, LENGTH, 5)
    split = torch.cat([split_in_two(kernels, (q, k, v), n) for n in lengths])
    whole = varlen(kernels, [q], [k], [v])[[n - 1 for n in lengths]]
    assert torch.allclose(split, whole, atol=1e-5)
    assert not torch.equal(split, whole)
