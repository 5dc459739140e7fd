"""RMSNorm by npu_rms_norm: bound to known modules, differentiable, split from the addition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.kernels.npu.norm import bind_norms, rms_norm
from rollout.model import load_model
from tests.rollout.kernels.npu.emulator.host import emulated


@pytest.mark.parametrize("tiled", [True, False])
def test_values_and_gradients(tiled: bool) -> None:
    x = torch.randn(2, 70, 32, requires_grad=True)
    weight = torch.randn(32, requires_grad=True)
    out = rms_norm(x, weight, 1e-6, tiled=tiled)
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    grads = torch.autograd.grad(wanted.square().sum(), (x, weight))
    got = torch.autograd.grad(out.square().sum(), (x, weight))
    assert torch.allclose(out, wanted, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(got, grads, strict=True))


def test_every_norm_of_a_model_is_bound(tiny_qwen3_path: Path) -> None:
    model = load_model(tiny_qwen3_path, dtype=torch.bfloat16, kernels=emulated())
    norms = [m for m in model.hf.modules() if type(m).__name__.endswith("RMSNorm")]
    assert len(norms) == 2 * 4 + 1 and all("forward" in vars(m) for m in norms)


def test_other_norms_keep_their_forward() -> None:
    class GemmaRMSNorm(torch.nn.Module):
        pass

    model = torch.nn.Sequential(GemmaRMSNorm(), torch.nn.LayerNorm(4))
    assert bind_norms(model, tiled=True) == 0 and all("forward" not in vars(m) for m in model)
