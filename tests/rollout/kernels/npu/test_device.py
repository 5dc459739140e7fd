"""Host tables, device tensors: a device that is not the CPU (meta) shows every tensor that was left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import masking_utils

from rollout.attention import PagedStep
from rollout.certify import attention, forward, linear, rows, threads
from rollout.certify import subject as subject_module
from rollout.certify.subject import Family, Subject, compare
from rollout.kernels.base import KVLayout
from rollout.kernels.npu import norm
from rollout.kernels.npu.fa3 import FlashAttention
from rollout.kernels.npu.kernel_set import NpuKernelSet
from rollout.kernels.npu.lines import LATER, TRAIN_INFER, CodeLine
from rollout.logprobs import policy_logprob_rows
from rollout.model import SharedModel, load_model
from tests.rollout.kernels.npu.emulator.fa3 import EmulatedPackage
from tests.rollout.kernels.npu.emulator.host import runtime
from trainer_bridge.forward import TrainingForward, TrainingSample

META = torch.device("meta")


def on_meta(q: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Stands for either kernel: every tensor must be on the device, every length on the host."""
    given = [*args, *options.values()]
    assert all(x.device == META for x in (q, *given) if isinstance(x, torch.Tensor))
    assert any(isinstance(x, int) and not isinstance(x, bool) for x in given), "max_seqlen is a host number"
    if options.get("return_softmax_lse") or options.get("return_attn_probs"):
        return torch.empty_like(q), q.new_empty(q.size(1), q.size(0), dtype=torch.float32)
    return torch.empty_like(q)


@pytest.fixture(autouse=True)
def meta_norm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # transformers reads one number of the positions back to the host in every forward, which meta has not.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)

    library = torch.library.Library("npu", "IMPL")

    def shapes(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), x.new_empty(x.size(0), 1)

    library.impl("npu_rms_norm", shapes, "Meta")
    yield
    library._destroy()


def model_on_meta(path: Path, line: CodeLine, plan: str = "auto") -> SharedModel:
    flash = FlashAttention(line, "0", on_meta, on_meta)
    found = dataclasses.replace(runtime(EmulatedPackage()), device=META, flash=flash)
    return load_model(path, dtype=torch.bfloat16, kernels=NpuKernelSet(found, 128, plan))


@pytest.mark.parametrize(
    ("line", "plan"), [(LATER, "tile_aligned"), (LATER, "row_by_row"), (TRAIN_INFER, "plain")], ids=lambda v: str(v)[:9]
)
@torch.no_grad()
def test_a_rollout_step(tiny_qwen3_path: Path, line: CodeLine, plan: str) -> None:
    model = model_on_meta(tiny_qwen3_path, line, plan)
    assert all(p.device == META for _, p in model.parameters())
    spec = model.spec
    store = model.kernels.allocate_kv(
        KVLayout(spec.num_layers, 6, 128, spec.num_kv_heads, spec.head_dim, spec.dtype)
    )  # fmt: skip
    lengths, before = np.array([1, 140, 1]), np.array([10, 0, 200])
    positions = np.concatenate([np.arange(b, b + n) for b, n in zip(before, lengths, strict=True)])
    step = PagedStep(
        model.kernels,
        store,
        torch.from_numpy(positions),
        torch.tensor([[0, 0], [1, 2], [3, 4]], dtype=torch.int32),
        torch.from_numpy((before + lengths).astype(np.int32)),
        torch.tensor([0, 1, 141, 142], dtype=torch.int32),
    )
    hidden = model.hidden_states(torch.zeros(142, dtype=torch.int64), torch.from_numpy(positions), step)
    assert hidden.shape == (142, model.hf.config.hidden_size) and hidden.device == META
    logprobs = policy_logprob_rows(model.logits(hidden[:2]), torch.tensor([1.0, 0.5]), spec.vocab_size)
    assert logprobs.shape == (2, spec.vocab_size) and logprobs.device == META


@pytest.mark.parametrize("line", [LATER, TRAIN_INFER], ids=lambda line: line.name)
@torch.no_grad()
def test_a_training_pass(tiny_qwen3_path: Path, line: CodeLine) -> None:
    forward = TrainingForward(model_on_meta(tiny_qwen3_path, line))
    ids = np.zeros(30, np.int32)
    out = forward([TrainingSample(ids, ids[:7], 0.7), TrainingSample(ids[:3], ids, 1.0)])
    assert out.logprobs.shape == (37,) and out.logprobs.device == META


@pytest.mark.parametrize(
    "family", [linear.FAMILY, rows.FAMILY, attention.FAMILY, forward.FAMILY, threads.FAMILY], ids=lambda f: f.name
)
@torch.no_grad()
def test_the_certificate_runs_on_the_device(
    tiny_qwen3_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared was computed there, not on the host beside it."""
    compared: list[torch.device] = []

    def seen(left: torch.Tensor, right: torch.Tensor) -> int:
        assert left.shape == right.shape and left.dtype == right.dtype
        compared.extend((left.device, right.device))
        return 0

    monkeypatch.setattr(subject_module, "count_unequal", seen)
    monkeypatch.setattr(attention, "_against_float64", lambda inputs, out: compare("", out, out))
    model = model_on_meta(tiny_qwen3_path, LATER)
    assert all(o.holds for o in family.checks(Subject(model, None, "quick", (1, 2))))
    assert set(compared) == {META}


def test_the_check_can_fail() -> None:
    """Negative control."""
    with pytest.raises(AssertionError):
        on_meta(torch.empty(1, device=META), torch.empty(1), max_seqlen_q=1)
    with pytest.raises(RuntimeError, match="device"):
        norm.rms_norm(torch.empty(2, 4, device=META), torch.empty(4), 1e-6, tiled=False) + torch.empty(2, 4)
