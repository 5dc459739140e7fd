"""The NPU set's contract: shapes, sizes and options honoured or refused; masks as in section H of the cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.errors import ConfigError, InvalidRequest, ParityError, UnsupportedFeature
from rollout.kernels.base import FEATURES, KVLayout
from rollout.kernels.npu.capabilities import PACKAGE, describe
from rollout.kernels.npu.fused_infer import causal_mask
from rollout.kernels.npu.kernel_set import NpuKernelSet
from rollout.kernels.npu.lines import LATER as LATER_LINE
from rollout.kernels.npu.lines import TRAIN_INFER as TRAIN_INFER_LINE
from rollout.kernels.npu.package_ops import FUSED_INFER, PackageOps
from rollout.kernels.npu.plans import PLANS, Measured, choose_plan, plan_named
from rollout.kernels.npu.probe import seen_by_sums
from rollout.kernels.npu.store import NpuKVStore
from tests.rollout.kernels.dense import edges, rows, visible
from tests.rollout.kernels.npu.emulator.fa3 import EmulatedPackage
from tests.rollout.kernels.npu.emulator.host import LATER, TRAIN_INFER, EmulatedKernelSet, emulated, runtime
from tests.rollout.kernels.npu.emulator.package import emulated_ops
from tests.rollout.kernels.npu.positions import Probe

SETS = [(LATER, "tile_aligned"), (TRAIN_INFER, "plain"), (LATER, "row_by_row")]


def layout(**changed: object) -> KVLayout:
    values = {"num_layers": 1, "num_pages": 4, "page_size": 128, "num_kv_heads": 2, "head_dim": 16}
    return KVLayout(**(values | {"dtype": torch.bfloat16} | changed))  # type: ignore[arg-type]


# ---- H: masks, by values that are the key's own index -----------------------------------------------------------


@pytest.mark.parametrize(("version", "plan"), SETS)
@pytest.mark.parametrize(("q_len", "k_len"), [(2, 5), (1, 5), (5, 5), (130, 200), (3, 130)])
def test_bottom_right_mask(version: str, plan: str, q_len: int, k_len: int) -> None:
    """H1: equal scores, V the one-hot of the key: the output shows which keys were seen."""
    kernels = emulated(version, plan)
    q, k = torch.zeros(q_len, 1, 256, dtype=torch.bfloat16), torch.zeros(k_len, 1, 256, dtype=torch.bfloat16)
    v = torch.eye(k_len, 256).to(torch.bfloat16)[:, None]
    out = kernels.attention_varlen(q, k, v, cu_seqlens_q=edges([q_len]), cu_seqlens_k=edges([k_len]), softmax_scale=1.0)
    assert torch.equal(out[:, 0, :k_len] != 0, visible(q_len, k_len, True))


def test_more_rows_than_keys_are_refused() -> None:
    """H2: releases of the package disagree about rows before the first key, so none is asked."""
    x = rows(0, 5, 2, 16, torch.bfloat16)
    with pytest.raises(InvalidRequest, match="5 query rows and 2 keys"):
        emulated().attention_varlen(
            x, x[:2], x[:2], cu_seqlens_q=edges([5]), cu_seqlens_k=edges([2]), softmax_scale=1.0
        )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (6, 3), (4, 4)])
def test_heads_are_grouped_in_order(heads: int, kv_heads: int) -> None:
    """H10: query head h reads KV head h // group."""
    q, k = torch.zeros(3, heads, 16, dtype=torch.bfloat16), torch.zeros(3, kv_heads, 16, dtype=torch.bfloat16)
    v = torch.arange(float(kv_heads)).to(torch.bfloat16)[None, :, None].expand(3, -1, 16).contiguous()
    out = emulated().attention_varlen(q, k, v, cu_seqlens_q=edges([3]), cu_seqlens_k=edges([3]), softmax_scale=1.0)
    assert out[:, :, 0].tolist() == [[float(h // (heads // kv_heads)) for h in range(heads)]] * 3


@pytest.mark.parametrize(("version", "plan"), SETS)
def test_packed_sequences_do_not_see_each_other(version: str, plan: str) -> None:
    """H5: B's bits are B's alone, whatever stands before it."""
    kernels = emulated(version, plan)
    a, b = (tuple(rows(s + i, n, 2, 16, torch.bfloat16) for i in range(3)) for s, n in ((10, 150), (20, 70)))
    alone = kernels.attention_varlen(*b, cu_seqlens_q=edges([70]), cu_seqlens_k=edges([70]), softmax_scale=0.2)
    both = [torch.cat(pair) for pair in zip(a, b, strict=True)]
    cu = edges([150, 70])
    assert torch.equal(
        kernels.attention_varlen(*both, cu_seqlens_q=cu, cu_seqlens_k=cu, softmax_scale=0.2)[150:], alone
    )


def test_without_causality_nothing_is_padded() -> None:
    """A vision tower's attention: padded keys would be seen."""
    kernels = emulated()
    q, k, v = (rows(i, 70, 2, 16, torch.bfloat16) for i in range(3))
    cu = edges([30, 40])
    out = kernels.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, softmax_scale=0.2, causal=False)
    assert kernels.package.calls[-1].k_lengths == [30, 40] and kernels.package.calls[-1].arguments["causal"] is False
    alone = kernels.attention_varlen(
        q[30:], k[30:], v[30:], cu_seqlens_q=edges([40]), cu_seqlens_k=edges([40]), softmax_scale=0.2, causal=False
    )
    assert torch.equal(out[30:], alone)


# ---- arguments of the package's calls (L2) ----------------------------------------------------------------------


@pytest.mark.parametrize(("version", "plan"), SETS[:2])
def test_every_call_is_written_out(version: str, plan: str) -> None:
    kernels = emulated(version, plan)
    probe = Probe(kernels, 200)
    probe.trained()
    probe.decoded([3, 199])
    varlen, kvcache = kernels.package.calls
    padded = plan == "tile_aligned"
    assert varlen.name == "flash_attn_varlen_func" and varlen.q_lengths == [256 if padded else 200]
    assert varlen.arguments["deterministic"] is True and varlen.arguments["causal"] is True
    assert kvcache.k_lengths == ([128, 256] if padded else [4, 200])
    assert kvcache.q_lengths == ([125, 57] if padded else [1, 1])
    given = kvcache.arguments
    assert given["num_splits"] == 1 and given["max_seqlen_q"] == max(kvcache.q_lengths) and given["causal"] is True
    for name in ("k", "v", "scheduler_metadata", "cache_batch_idx", "cache_leftpad", "rotary_cos", "pack_gqa"):
        assert given[name] is None, name
    assert all(given[n].dtype == torch.int32 for n in ("cache_seqlens", "page_table", "cu_seqlens_q"))


def test_fused_infer_arguments() -> None:
    """Lengths as host lists, queries summed without a leading 0, keys not summed; causality by an explicit mask."""
    seen: list[dict[str, object]] = []

    def operator(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object
    ) -> tuple[torch.Tensor, int]:
        seen.append(options | {"key": key})
        return query, 0

    ops = PackageOps("2.0.0", emulated_ops(**{FUSED_INFER: operator}))
    kernels = EmulatedKernelSet(EmulatedPackage(TRAIN_INFER), "fused_infer", ops)
    store = kernels.allocate_kv(layout())
    kernels.attention_with_kvcache(
        rows(0, 6, 4, 16, torch.bfloat16), store, 0, page_table=torch.zeros(3, 2, dtype=torch.int32),
        cache_seqlens=torch.tensor([7, 130, 9], dtype=torch.int32), cu_seqlens_q=edges([2, 3, 1]), softmax_scale=0.5,
    )  # fmt: skip
    decode, prefill = seen
    assert (decode["actual_seq_lengths"], decode["actual_seq_lengths_kv"]) == ([1], [9])
    assert (prefill["actual_seq_lengths"], prefill["actual_seq_lengths_kv"]) == ([2, 5], [7, 130])
    for call in seen:
        assert call["sparse_mode"] == 3 and call["input_layout"] == "TND" and call["block_size"] == 128
        assert call["num_heads"] == 4 and call["num_key_value_heads"] == 2 and call["scale"] == 0.5
        assert isinstance(call["key"], torch.Tensor) and call["key"].shape == (4, 128, 32)
    mask = causal_mask(torch.device("cpu"))
    assert mask.dtype == torch.bool and mask.shape == (2048, 2048) and not mask[5, 5] and mask[5, 6]


def test_fused_infer_gives_values_of_the_operator_and_gradients_of_fa3() -> None:
    def operator(query: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, int]:
        return torch.full_like(query, 7.0), 0

    ops = PackageOps("2.0.0", emulated_ops(**{FUSED_INFER: operator}))
    kernels = EmulatedKernelSet(EmulatedPackage(TRAIN_INFER), "fused_infer", ops)
    q, k, v = (rows(i, 20, 2, 16, torch.bfloat16).requires_grad_() for i in range(3))
    cu = edges([20])
    out = kernels.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, softmax_scale=0.2)
    out.sum().backward()
    assert bool((out == 7).all()) and all(x.grad is not None and bool(x.grad.any()) for x in (q, v))


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_sizes_and_options() -> None:
    with pytest.raises(ConfigError, match="page size 64 is not 128"):
        NpuKernelSet(runtime(EmulatedPackage()), 64)
    with pytest.raises(ConfigError, match="none of auto, plain"):
        emulated(plan="fast")
    with pytest.raises(UnsupportedFeature, match="fused-infer operator of the Ascend package"):
        emulated(plan="fused_infer")
    kernels = emulated()
    with pytest.raises(UnsupportedFeature, match=r"not torch.float32"):
        kernels.allocate_kv(layout(dtype=torch.float32))
    with pytest.raises(UnsupportedFeature, match="head dim 512"):
        kernels.allocate_kv(layout(head_dim=512))
    with pytest.raises(ConfigError, match="pages of 16"):
        kernels.allocate_kv(layout(page_size=16))
    x = rows(0, 4, 3, 16, torch.bfloat16)
    with pytest.raises(InvalidRequest, match="does not fit 2 KV heads"):
        kernels.attention_varlen(
            x, x[:, :2], x[:, :2], cu_seqlens_q=edges([4]), cu_seqlens_k=edges([4]), softmax_scale=1.0
        )


def test_a_cache_beyond_32_bit_offsets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"32-bit page offsets; keep engine.kv_cache_tokens below 4194304"):
        NpuKVStore(layout(num_pages=2**15, num_kv_heads=8, head_dim=128), torch.device("cpu"))


@pytest.mark.parametrize("feature", sorted(set(FEATURES) - {"causal", "gqa", "paged", "varlen", "backward"}))
def test_a_feature_that_is_absent_is_named(feature: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"needs {feature} .*kernel set 'npu'.*it supports: backward, causal"):
        emulated().require(feature, "model M")


def test_the_capability_table_covers_every_feature_on_both_lines() -> None:
    assert set(PACKAGE) == set(FEATURES)
    assert describe("sliding_window", TRAIN_INFER_LINE) == "no" and "not offered" in describe("softcap", LATER_LINE)


def test_plans() -> None:
    assert (
        plan_named("auto", LATER_LINE).name == "tile_aligned" and plan_named("auto", TRAIN_INFER_LINE).name == "plain"
    )
    with pytest.raises(ParityError, match=r"plain: 1 of 9 values differ, 0\.50 s; .*fused_infer: 1 of 9"):
        choose_plan(lambda plan: Measured(plan.name, 1, 9, 0.5))
    with pytest.raises(ParityError):
        choose_plan(lambda plan: Measured(plan.name, 0, 0, 0.5))
    assert choose_plan(lambda plan: Measured(plan.name, 0, 1, 0.5)).plan is PLANS[0]


def test_sums_are_those_of_the_same_calls() -> None:
    kernels = emulated()
    probe, sums = Probe(kernels, 140), Probe(seen_by_sums(kernels), 140)
    lse = sums.trained()
    scores = (probe.q.float().transpose(0, 1) @ probe.k.float().repeat_interleave(2, 1).transpose(0, 1).mT) * 0.31
    wanted = scores.masked_fill(~visible(140, 140, True), -torch.inf).logsumexp(-1)
    assert lse.shape == (140, 4, 1) and np.allclose(lse[:, :, 0].T, wanted, atol=1e-4)
    assert probe.trained().shape == (140, 4, 16)


def test_reading_back() -> None:
    store = emulated().allocate_kv(layout())
    k, v, slots = rows(0, 3, 2, 16, torch.bfloat16), rows(1, 3, 2, 16, torch.bfloat16), torch.tensor([0, 1, 300])
    store.write(0, k, v, slots)
    got = store.read(0, slots)
    assert torch.equal(got[0], k) and torch.equal(got[1], v)


@pytest.mark.parametrize("count", [1, 100, 127])
def test_copied_rows_and_finite_slots_behind_them(count: int) -> None:
    """A page is cleared where its first row is written; here none is."""
    store = emulated().allocate_kv(layout())
    store.poison()
    slots = torch.arange(128)
    k, v = rows(0, 128, 2, 16, torch.bfloat16), rows(1, 128, 2, 16, torch.bfloat16)
    store.write(0, k, v, slots)
    store.copy_rows(0, 2, count)
    for got, written in zip(store.read(0, slots + 256), (k, v), strict=True):
        assert torch.equal(got[:count], written[:count]) and not bool(got[count:].any())
    assert bool(store.read(0, slots + 128)[0].isnan().all())
