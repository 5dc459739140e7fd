"""Vision towers: one resolution, masks kept, an image's bits its own; on the CPU set and on the emulated NPU set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from rollout.errors import ConfigError, InvalidRequest, UnsupportedFeature
from rollout.kernels.base import KernelSet
from rollout.kernels.npu.invariant import InvariantMode
from rollout.kernels.registry import resolve_kernels
from rollout.vision import VisionAttention, VisionChoice, bind_vision, resolve_vision
from tests.engines import torch_threads
from tests.rollout.kernels.dense import dense
from tests.rollout.kernels.npu.emulator.device import npu_operators
from tests.rollout.kernels.npu.emulator.host import emulated

GRIDS = [(1, 4, 6), (1, 8, 4), (1, 2, 2)]
PATCH = 2 * 3 * 14 * 14


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    npu_operators()
    with torch_threads(1):
        yield


def tower(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "qwen2.5-vl":
        config = Qwen2_5_VLVisionConfig(
            depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=24, patch_size=14,
            window_size=56, fullatt_block_indexes=[1],
        )  # fmt: skip
        model: Any = Qwen2_5_VisionTransformerPretrainedModel(config)
    else:
        vision = Qwen3VLVisionConfig(
            depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=24, patch_size=14,
            num_position_embeddings=64, deepstack_visual_indexes=[0],
        )  # fmt: skip
        model = Qwen3VLVisionModel(vision)
    return model.to(torch.bfloat16).eval()


def pixels(seed: int, grid: tuple[int, int, int]) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal((int(np.prod(grid)), PATCH)).astype(np.float32)
    return torch.from_numpy(values).to(torch.bfloat16)


def kernels_of(name: str) -> KernelSet:
    return resolve_kernels("cpu") if name == "cpu" else emulated()


@torch.no_grad()
def features(model: Any, kernels: KernelSet, images: list[int]) -> list[torch.Tensor]:
    """Merged features of each image, encoded together."""
    grid = torch.tensor([GRIDS[i] for i in images])
    with kernels.invariant_mode():
        out = model(torch.cat([pixels(i, GRIDS[i]) for i in images]), grid_thw=grid)
    merged = out.pooler_output if hasattr(out, "pooler_output") else out[0] if isinstance(out, tuple) else out
    joined = torch.cat(list(merged)) if isinstance(merged, list | tuple) else merged
    return list(joined.split([int(np.prod(GRIDS[i])) // 4 for i in images]))


@pytest.mark.parametrize("name", ["cpu", "npu"])
@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3-vl"])
def test_an_image_does_not_see_its_neighbours(name: str, kind: str) -> None:
    """Encoded alone (a rollout's prompt) and packed with others (a training batch): the same bits."""
    kernels, model = kernels_of(name), tower(kind)
    attention = bind_vision(model, kernels, resolve_vision(kernels))
    together = features(model, kernels, [0, 1, 2])
    for i in range(3):
        (alone,) = features(model, kernels, [i])
        assert torch.equal(alone, together[i]), f"image {i}"
    swapped = features(model, kernels, [2, 0])
    assert torch.equal(swapped[0], together[2]) and torch.equal(swapped[1], together[0])
    expected = "kernel_set" if name == "cpu" else "npu_fusion"
    assert attention.name == expected and attention.calls[expected] > 0 == attention.calls["sdpa"]
    assert bool(together[0].isfinite().all()) and not torch.equal(together[0][:1], together[1][:1])


@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3-vl"])
def test_near_the_unbound_tower(kind: str) -> None:
    """The bound tower computes what transformers' own does, up to rounding."""
    kernels, bound, plain = resolve_kernels("cpu"), tower(kind), tower(kind)
    bind_vision(bound, kernels, resolve_vision(kernels))
    plain.config._attn_implementation = "sdpa"
    got, wanted = (features(m, kernels, [0, 1]) for m in (bound, plain))
    assert all(torch.allclose(a.float(), b.float(), atol=0.05) for a, b in zip(got, wanted, strict=True))


def test_without_binding_an_image_may_see_its_neighbours() -> None:
    """Negative control, in float32: the emulated device's stock kernels, with no mode above them."""
    kernels, model = emulated(), tower("qwen3-vl").float()
    bind_vision(model, kernels, resolve_vision(kernels))
    kernels._mode = InvariantMode("CPU", {})
    together = features(model, kernels, [0, 1, 2])
    assert any(not torch.equal(features(model, kernels, [i])[0], together[i]) for i in range(3))


def test_resolution_order() -> None:
    cpu, npu = resolve_kernels("cpu"), emulated()
    assert resolve_vision(cpu) == VisionChoice("kernel_set", "platform")
    assert resolve_vision(npu) == VisionChoice("npu_fusion", "platform")
    assert resolve_vision(npu, "kernel_set", model_default="sdpa") == VisionChoice("kernel_set", "explicit")
    assert resolve_vision(npu, model_default="sdpa") == VisionChoice("sdpa", "model")
    with pytest.raises(ConfigError, match="none of auto, kernel_set"):
        resolve_vision(npu, "fa3")
    with pytest.raises(UnsupportedFeature, match="'cpu' was resolved"):
        resolve_vision(cpu, "npu_fusion")


@pytest.mark.parametrize("name", ["cpu", "npu"])
def test_an_additive_mask_is_kept(name: str) -> None:
    """It takes SDPA for that call, whatever was resolved; hidden keys leave no trace."""
    kernels = kernels_of(name)
    attention = VisionAttention(kernels, resolve_vision(kernels))
    q, k, v = (torch.randn(1, 2, 6, 16).to(torch.bfloat16) for _ in range(3))
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.bfloat16)
    mask[..., 4:] = -torch.inf
    masked = attention.attend(q, k, v, 0.25, mask)
    assert attention.calls["sdpa"] == 1 == sum(attention.calls.values())
    poisoned = v.clone()
    poisoned[:, :, 4:] = 100.0
    assert torch.equal(attention.attend(q, k, poisoned, 0.25, mask), masked)
    unmasked = attention.attend(q, k, v, 0.25, None)
    assert attention.calls[attention.name] == 1 and not torch.equal(unmasked, masked)
    wanted, _ = dense(*(x[0].transpose(0, 1) for x in (q, k, v)), 0.25, causal=False)
    assert (unmasked[0].double() - wanted).abs().max() < 2e-2


def test_refusals() -> None:
    kernels, model = resolve_kernels("cpu"), tower("qwen3-vl")
    bind_vision(model, kernels, resolve_vision(kernels))
    block = model.blocks[0].attn
    from rollout.vision import vision_interface

    x = torch.zeros(1, 2, 3, 16)
    for option in ({"dropout": 0.1}, {"is_causal": True}, {"sliding_window": 4}, {"softcap": 5.0}):
        with pytest.raises(UnsupportedFeature, match="a vision tower asked"):
            vision_interface(block, x, x, x, None, scaling=1.0, **option)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="without bind_vision"):
        vision_interface(torch.nn.Linear(1, 1), x, x, x, None, scaling=1.0)
    other = torch.nn.Linear(1, 1)
    other.config = model.config  # type: ignore[assignment]
    with pytest.raises(UnsupportedFeature, match="no attention that can be bound"):
        bind_vision(other, kernels, resolve_vision(kernels))
