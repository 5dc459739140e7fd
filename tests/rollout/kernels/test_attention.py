"""The FA3 contract of the CPU attention: masks, empty rows, head order, order of arithmetic, accuracy (H1, H2, H10)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rollout.errors import InvalidRequest
from rollout.kernels.cpu.kernel_set import CpuKernelSet, _attend, cpu_kernels
from tests.rollout.kernels.dense import by_the_book, dense, edges, paged, rows, store_of, varlen

Call = Callable[..., torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@pytest.fixture(params=[16, 128], ids=["page16", "page128"])
def kernels(request: pytest.FixtureRequest) -> CpuKernelSet:
    return cpu_kernels(request.param)


def seen_by(call: Call, kernels: CpuKernelSet, q_len: int, k_len: int, causal: bool = True) -> list[str]:
    """The mask itself: Q = K = 0 and V one-hot by key, so that a row's output is spread evenly over what it sees."""
    zeros = torch.zeros(q_len, 1, 16), torch.zeros(k_len, 1, 16)
    out = call(kernels, [zeros[0]], [zeros[1]], [torch.eye(16)[:k_len, None]], causal=causal)
    masks = []
    for row in out[:, 0, :k_len]:
        count = int((row != 0).sum())
        assert torch.equal(row[row != 0], torch.full((count,), np.float32(1) / np.float32(max(count, 1))))
        masks.append("".join("1" if x else "0" for x in row))
    return masks


@pytest.mark.parametrize("call", [paged, varlen])
def test_causal_mask_is_aligned_bottom_right(kernels: CpuKernelSet, call: Call) -> None:
    assert seen_by(call, kernels, 2, 5) == ["11110", "11111"]
    assert seen_by(call, kernels, 5, 2) == ["00", "00", "00", "10", "11"]
    assert seen_by(call, kernels, 1, 5) == ["11111"]
    assert seen_by(call, kernels, 3, 3) == ["100", "110", "111"]
    assert seen_by(call, kernels, 2, 3, causal=False) == ["111", "111"]
    # The top-left mask of SDPA, which must not pass for ours.
    top_left = torch.ones(2, 5).tril()
    assert ["".join(str(int(x)) for x in r) for r in top_left] == ["10000", "11000"] != seen_by(call, kernels, 2, 5)


@pytest.mark.parametrize("call", [paged, varlen])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys_are_zero(kernels: CpuKernelSet, call: Call, dtype: torch.dtype) -> None:
    q, k, v = rows(0, 5, 4, 16, dtype), rows(1, 2, 2, 16, dtype), rows(2, 2, 2, 16, dtype)
    out = call(kernels, [q], [k], [v])
    assert torch.equal(out[:3], torch.zeros(3, 4, 16, dtype=dtype))
    assert bool((out[3:] != 0).all())
    empty = call(kernels, [q, q[:1]], [k[:0], k], [v[:0], v], causal=False)
    assert torch.equal(empty[:5], torch.zeros(5, 4, 16, dtype=dtype)) and bool((empty[5] != 0).all())


def test_log_sum_exp_of_rows_with_and_without_keys() -> None:
    kernels = cpu_kernels(16)
    q, k, v = rows(0, 40, 4, 16), rows(1, 37, 2, 16), rows(2, 37, 2, 16)
    store, table = store_of(kernels, [k], [v])
    lengths = np.array([37], np.int32)
    _, lse = _attend(q, store, 0, table.numpy(), lengths, edges([40]).numpy(), 0.25, True)
    assert lse[:, :3].tolist() == [[-torch.inf] * 3] * 4
    assert torch.allclose(lse[:, 3:].double(), dense(q, k, v, 0.25)[1][:, 3:], atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (6, 3), (4, 4), (3, 1)])
@pytest.mark.parametrize("call", [paged, varlen])
def test_query_heads_share_neighbouring_kv_heads(kernels: CpuKernelSet, call: Call, heads: int, kv_heads: int) -> None:
    q, k = torch.zeros(1, heads, 16), torch.zeros(3, kv_heads, 16)
    v = torch.arange(kv_heads, dtype=torch.float32)[None, :, None].expand(3, kv_heads, 16).contiguous()
    out = call(kernels, [q], [k], [v])
    owner = [int(x) for x in out[0, :, 0]]
    assert owner == [h // (heads // kv_heads) for h in range(heads)]
    if 1 < kv_heads < heads:
        assert owner != [h % kv_heads for h in range(heads)]


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 64])
def test_order_of_arithmetic_is_the_stated_one(page: int, length: int) -> None:
    """Bits of plain float32 steps in numpy: one fused multiply-add a term, blocks and lanes as documented."""
    q, k, v = rows(3, 1, 4, 18), rows(4, length, 2, 18), rows(5, length, 2, 18)
    out = paged(cpu_kernels(page), [q], [k], [v], scale=0.3)
    for head in range(4):
        expected = by_the_book(q[0, head].numpy(), k[:, head // 2].numpy(), v[:, head // 2].numpy(), page, 0.3)
        assert out[0, head].numpy().tobytes() == expected.tobytes()


def test_another_order_of_arithmetic_shows() -> None:
    """Negative control: other blocks, or keys in reverse, are as right and not the same bits."""
    q, k, v = rows(3, 1, 4, 18), rows(4, 64, 4, 18), rows(5, 64, 4, 18)
    out = paged(cpu_kernels(16), [q], [k], [v], scale=0.3)
    for head in range(4):
        args = q[0, head].numpy(), k[:, head].numpy(), v[:, head].numpy()
        assert out[0, head].numpy().tobytes() == by_the_book(*args, 16, 0.3).tobytes()
        reverse = by_the_book(args[0], args[1][::-1], args[2][::-1], 16, 0.3)
        assert np.allclose(reverse, out[0, head], atol=1e-6)
        assert out[0, head].numpy().tobytes() != reverse.tobytes()
    blocks = [by_the_book(q[0, h].numpy(), k[:, h].numpy(), v[:, h].numpy(), 32, 0.3) for h in range(4)]
    assert not np.array_equal(np.stack(blocks), out[0].numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (3, 1, 50), (2, 2, 256)])
def test_accuracy(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Against dense float64 on the same rounded inputs.

    Bound: float32 sums of n <= 200 terms of size max|V|, plus exp at 2 ulp of scores up to 8, so 64 units of float32;
    then one rounding of the output to its dtype.
    """
    lengths = [1, 130, 200]
    q = [rows(i, min(n, 9), heads, dim, dtype) for i, n in enumerate(lengths)]
    k, v = ([rows(10 * s + i, n, kv_heads, dim, dtype) for i, n in enumerate(lengths)] for s in (1, 2))
    out = varlen(cpu_kernels(128), q, k, v, scale=dim**-0.5)
    expected = torch.cat([dense(*qkv, dim**-0.5)[0] for qkv in zip(q, k, v, strict=True)])
    bound = 64 * 2.0**-24 * 5.0 + (UNIT[dtype] * expected.abs() if dtype == torch.bfloat16 else 0)
    error = (out.double() - expected).abs()
    assert bool((error <= bound).all()), float(error.max())
    # A scale of 1 / D instead of 1 / sqrt(D) does not pass.
    wrong = varlen(cpu_kernels(128), q, k, v, scale=1 / dim)
    assert not bool(((wrong.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_is_passed_on(where: str) -> None:
    """A NaN that a row sees is never laundered into a number; rows that do not see it keep their bits."""
    kernels = cpu_kernels(16)
    q, k, v = rows(6, 40, 2, 16), rows(7, 40, 1, 16), rows(8, 40, 1, 16)
    clean = varlen(kernels, [q], [k], [v])
    {"query": q, "key": k, "value": v}[where][20, 0, 3] = torch.nan
    out = varlen(kernels, [q], [k], [v])
    assert torch.equal(out[:20], clean[:20])
    assert bool(out[20, 0].isnan().any())
    if where == "query":
        assert torch.equal(out[21:], clean[21:])
    else:
        assert bool(out[21:].isnan().any(-1).all())


def test_scores_far_apart() -> None:
    """Online softmax over blocks whose maxima differ by more than exp can hold."""
    kernels = cpu_kernels(16)
    q, v = torch.ones(1, 1, 16), rows(9, 48, 1, 16)
    for order in ((-300.0, 0.0, 300.0), (300.0, 0.0, -300.0), (-300.0, -300.0, -300.0)):
        k = torch.cat([torch.full((16, 1, 16), s) for s in order])
        out = paged(kernels, [q], [k], [v], scale=1 / 16)
        assert torch.allclose(out.double(), dense(q, k, v, 1 / 16)[0], atol=1e-6)


def test_shapes_that_do_not_fit_are_refused(kernels: CpuKernelSet) -> None:
    q, k, v = rows(0, 4, 4, 16), rows(1, 4, 3, 16), rows(2, 4, 3, 16)
    for call in (paged, varlen):
        with pytest.raises(InvalidRequest, match="multiple of H_kv"):
            call(kernels, [q], [k], [v])
        with pytest.raises(InvalidRequest, match="KV heads of dim"):
            call(kernels, [q], [rows(1, 4, 2, 32)], [rows(2, 4, 2, 32)])
    good = rows(1, 4, 2, 16)
    for cu_q, cu_k in ((edges([3]), edges([4])), (edges([4]), edges([3]))):
        with pytest.raises(InvalidRequest, match="cu_seqlens"):
            kernels.attention_varlen(q, good, good, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, softmax_scale=1.0)
