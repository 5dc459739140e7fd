"""The vision part of a multimodal model: images to features, features to the rows of a pass. Both sides use it.

An image is encoded by a call of its own, so what its features are cannot depend on company.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from rollout.errors import InvalidRequest, UnsupportedFeature
from rollout.images import PIXEL_BYTES, ImageInput, check_image
from rollout.kernels.base import KernelSet
from rollout.placement import ImageSpan, Placement, VisionRules
from rollout.vision import VisionAttention, bind_vision, resolve_vision

ARCHITECTURES = frozenset({"Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"})
"""Proven bit-equal by tests/parity/test_multimodal.py."""
FEATURE_CACHE_BYTES = 256 * 1024 * 1024
"""An engine's features of recent images: siblings, chunks and preempted samples find theirs again."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What the tower says of one image."""

    embeds: torch.Tensor
    """[n, hidden] in place of the placeholders' embeddings"""
    deepstack: tuple[torch.Tensor, ...]
    """each [n, hidden], added after the first layers (Qwen3-VL)"""

    @property
    def num_bytes(self) -> int:
        """Memory of all of it."""
        return sum(x.numel() * x.element_size() for x in (self.embeds, *self.deepstack))


@dataclass(frozen=True, slots=True)
class VisualRows:
    """What a pass over T rows needs besides ids."""

    rope_positions: torch.Tensor
    """int64 [3, T]"""
    rows: torch.Tensor
    """int64 [n] rows that are features"""
    features: ImageFeatures | None
    """of those rows; None when n = 0"""


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether the model has a tower besides its text part."""
    return getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None


def check_inputs(config: PretrainedConfig) -> None:
    """Refuse a model with inputs that nothing here feeds.

    Raises:
        UnsupportedFeature: naming them.
    """
    if getattr(config, "audio_config", None) is not None:
        raise UnsupportedFeature(
            f"model {config.model_type} takes audio (config field audio_config), which is not supported; images are, "
            f"with {', '.join(sorted(ARCHITECTURES))}"
        )


def rules_of(config: Any) -> VisionRules:
    """Placeholders and patch sizes of a Qwen2.5-VL or Qwen3-VL config."""
    vision = config.vision_config
    channels = int(getattr(vision, "in_channels", 0) or getattr(vision, "in_chans", 3))
    return VisionRules(
        image_token_id=int(config.image_token_id),
        never_sampled=(int(config.image_token_id), int(config.video_token_id)),
        video_token_id=int(config.video_token_id),
        merge=int(vision.spatial_merge_size),
        patch_values=channels * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2,
    )


class VisionPart:
    """A loaded model's tower with its attention resolved and bound."""

    def __init__(self, hf: Any, kernels: KernelSet, vision_attention: str = "auto") -> None:
        self.rules = rules_of(hf.config)
        model_default = str(getattr(hf.config.vision_config, "zerodrift_attention", "auto"))
        choice = resolve_vision(kernels, vision_attention, model_default=model_default)
        self.attention: VisionAttention = bind_vision(hf.model.visual, kernels, choice)
        self._hf = hf
        self._device = kernels.device

    @property
    def name(self) -> str:
        """The resolved provider of the tower's attention: what manifests and graph runners read."""
        return self.attention.name

    def encode(self, image: ImageInput) -> ImageFeatures:
        """Features of one placed image; differentiable where gradients are on. Call in invariant mode."""
        pixels = pixels_of(image).to(self._device)
        grid = torch.tensor([image.grid_thw], device=self._device)
        out = self._hf.model.get_image_features(pixels, grid, return_dict=True)
        return ImageFeatures(torch.cat(list(out.pooler_output)), tuple(getattr(out, "deepstack_features", None) or ()))


class FeatureCache:
    """Features by image, least recently used out first. Cleared with the weights they came from."""

    def __init__(self, part: VisionPart, max_bytes: int = FEATURE_CACHE_BYTES) -> None:
        self._part = part
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self.num_encoded = 0

    def get(self, span: ImageSpan) -> ImageFeatures:
        """Features of the span's image, encoded when they are not kept."""
        found = self._kept.get(span.digest)
        if found is None:
            found = self._part.encode(span.image)
            self.num_encoded += 1
            self._kept[span.digest] = found
            while sum(f.num_bytes for f in self._kept.values()) > self._max_bytes and len(self._kept) > 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(span.digest)
        return found

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._kept.clear()


def visual_rows(
    parts: Sequence[tuple[Placement, int, int]], features: Callable[[ImageSpan], ImageFeatures]
) -> VisualRows:
    """Rows of a pass made of token ranges.

    Args:
        parts: for each sequence of the pass, in order: its placement, first token and number of tokens.
        features: an image's, whole; the part that lies in the range is taken.
    """
    rope, rows, taken = [], [], []
    offset = 0
    for placement, first, count in parts:
        rope.append(placement.rope(first, first + count))
        for span in placement.spans:
            low, high = max(span.start, first), min(span.end, first + count)
            if low < high:
                rows.append(np.arange(low, high) - first + offset)
                whole, here = features(span), slice(low - span.start, high - span.start)
                taken.append(ImageFeatures(whole.embeds[here], tuple(d[here] for d in whole.deepstack)))
        offset += count
    joined = None
    if taken:
        layers = zip(*(t.deepstack for t in taken), strict=True)
        joined = ImageFeatures(torch.cat([t.embeds for t in taken]), tuple(torch.cat(layer) for layer in layers))
    where = np.concatenate(rows) if rows else np.empty(0, np.int64)
    return VisualRows(torch.from_numpy(np.concatenate(rope, axis=1)), torch.from_numpy(where), joined)


def pixels_of(image: ImageInput) -> torch.Tensor:
    """[patches, values of one patch] in the image's own dtype."""
    return torch.frombuffer(bytearray(image.pixel_values), dtype=_DTYPES[image.dtype]).view(*image.shape)


def images_of(pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> tuple[ImageInput, ...]:
    """A Hugging Face processor's ``pixel_values`` and ``image_grid_thw``, one record an image.

    Args:
        pixel_values: [patches of all images, values of one patch]. image_grid_thw: int [images, 3].

    Raises:
        InvalidRequest: sizes that disagree, or a dtype the wire does not take.
    """
    if image_grid_thw.dim() != 2 or image_grid_thw.size(1) != 3 or pixel_values.dim() != 2:
        raise InvalidRequest(
            f"pixel_values {list(pixel_values.shape)} and image_grid_thw {list(image_grid_thw.shape)} must be "
            "[patches, values] and [images, 3]",
            field="images",
        )
    counts = [int(n) for n in image_grid_thw.prod(-1)]
    if sum(counts) != pixel_values.size(0):
        raise InvalidRequest(
            f"image_grid_thw {image_grid_thw.tolist()} asks for {sum(counts)} patches, pixel_values has "
            f"{pixel_values.size(0)}",
            field="images",
        )
    dtype = str(pixel_values.dtype).removeprefix("torch.")
    if dtype not in PIXEL_BYTES:
        raise InvalidRequest(f"pixel_values are {dtype}; use {', '.join(PIXEL_BYTES)}", field="images")
    images = []
    for part, grid in zip(pixel_values.detach().cpu().split(counts), image_grid_thw.tolist(), strict=True):
        data = part.contiguous().view(torch.uint8).numpy().tobytes()
        images.append(check_image(ImageInput(data, dtype, (part.size(0), part.size(1)), tuple(grid)), "images"))
    return tuple(images)
