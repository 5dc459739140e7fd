"""The emulator itself: right against float64, and wrong in exactly the ways of the package."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from tests.rollout.kernels.dense import dense, edges, rows
from tests.rollout.kernels.npu.emulator.fa3 import EmulatedPackage
from tests.rollout.kernels.npu.emulator.numerics import row_sum

TABLE = torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)


def pages(x: torch.Tensor) -> torch.Tensor:
    """[S, H, D] in the pages of TABLE; what is beyond is zero."""
    cache = x.new_zeros(4, 128, *x.shape[1:])
    for i, part in enumerate(x.split(128)):
        cache[TABLE[0, i], : len(part)] = part
    return cache


def call(package: EmulatedPackage, length: int, count: int, **options: object) -> torch.Tensor:
    q, k, v = (rows(s, length, h, 16, torch.bfloat16) for s, h in ((1, 4), (2, 2), (3, 2)))
    arguments: dict[str, object] = {
        "cache_seqlens": torch.tensor([length], dtype=torch.int32), "page_table": TABLE, "max_seqlen_q": count,
        "cu_seqlens_q": edges([count]), "causal": True, "num_splits": 1, "softmax_scale": 0.3,
    }  # fmt: skip
    out: torch.Tensor = package.flash().kvcache(q[length - count :], pages(k), pages(v), **(arguments | options))
    return out


@pytest.mark.parametrize("version", ["0.2.0b1", "0.4.2.post1"])
@pytest.mark.parametrize(("length", "count"), [(1, 1), (130, 130), (300, 1), (512, 512), (400, 37)])
def test_near_the_oracle(version: str, length: int, count: int) -> None:
    got = call(EmulatedPackage(version), length, count)
    q, k, v = (rows(s, length, h, 16, torch.bfloat16) for s, h in ((1, 4), (2, 2), (3, 2)))
    wanted, _ = dense(q[length - count :], k, v, 0.3)
    assert (got.double() - wanted).abs().max() < 2e-2


def test_lse_is_given_on_request_in_a_tuple_of_four() -> None:
    out, lse, *rest = call(EmulatedPackage(), 200, 10, return_softmax_lse=True)
    assert lse.shape == (4, 10) and lse.dtype == torch.float32 and rest == [None, None] and out.shape == (10, 4, 16)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 128, 191, 192, 193, 255, 256, 300, 511, 512])
def test_row_sums_differ_only_where_a_tree_has_a_fourth_block(width: int) -> None:
    random = np.random.default_rng(width)
    p = random.random((200, 512)).astype(np.float32)
    both = [[row_sum(row, width, by) for row in p] for by in (True, False)]
    differing = sum(a != b for a, b in zip(*both, strict=True))
    assert (differing > 0) == (width in (256, 512))
    exact = p[:, :width].astype(np.float64).sum(1)
    assert np.allclose(both[0], exact, rtol=1e-6) and np.allclose(both[1], exact, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_leftpad": torch.zeros(1)},
        {"rotary_cos": torch.zeros(1)},
        {"q_descale": torch.zeros(1)},
        {"attention_chunk": 4},
        {"pack_gqa": True},
        {"softcap": -1.0},
        {"num_splits": 21},
        {"num_splits": -1},
        {"max_seqlen_q": None},
        {"page_table": TABLE.long()},
    ],
    ids=lambda o: next(iter(o)),
)
def test_what_the_package_rejects(options: dict[str, object]) -> None:
    with pytest.raises(RuntimeError):
        call(EmulatedPackage(), 200, 2, **options)


@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"window_size": (4, 0)}, {"scheduler_metadata": 1}, {"num_splits": 2}]
)
def test_what_only_the_train_infer_line_rejects(options: dict[str, object]) -> None:
    with pytest.raises(RuntimeError, match=r"0\.2\.0b1"):
        call(EmulatedPackage("0.2.0b1"), 200, 2, **options)


def test_what_the_package_ignores() -> None:
    plain = call(EmulatedPackage("0.3.0"), 200, 2)
    new = rows(9, 2, 2, 16, torch.bfloat16)
    ignored = {
        "k": new,
        "v": new,
        "cache_batch_idx": torch.ones(1),
        "qv": new,
        "sm_margin": 3,
        "rotary_interleaved": False,
    }
    assert torch.equal(call(EmulatedPackage("0.3.0"), 200, 2, **ignored), plain)
    # From 0.4 on new keys are appended instead.
    assert not torch.equal(call(EmulatedPackage("0.4.2.post1"), 200, 2, k=new, v=new), plain)
    # 0.3's metadata brings its own scale.
    assert not torch.equal(call(EmulatedPackage("0.3.0"), 200, 2, scheduler_metadata=object()), plain)
    assert torch.equal(call(EmulatedPackage("0.3.0"), 200, 2, scheduler_metadata=object(), softmax_scale=0.25),
                       call(EmulatedPackage("0.3.0"), 200, 2, softmax_scale=0.25))  # fmt: skip


def test_float32_is_refused() -> None:
    flash = EmulatedPackage().flash()
    x = rows(0, 4, 2, 16)
    with pytest.raises(RuntimeError, match="float16 or bfloat16"):
        flash.varlen(x, x, x, edges([4]), edges([4]), 4, 4, causal=True)


def test_signatures_are_the_recorded_ones() -> None:
    """The same text that make test-npu-contract compares with the package from PyPI."""
    from tests.npu_contract.signatures import LATER_LINE, TRAIN_INFER_LINE

    for version, recorded in (("0.4.2.post1", LATER_LINE), ("0.2.0b1", TRAIN_INFER_LINE)):
        modules = EmulatedPackage(version).modules()
        for place, signature in recorded.items():
            module, _, name = place.partition(":")
            assert str(inspect.signature(getattr(modules[module], name))) == signature, place
