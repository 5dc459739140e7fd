"""Random images and image prompts for the tiny multimodal models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rollout.images import ImageInput
from rollout.multimodal import images_of
from rollout.types import SampleRequest
from tests.engines import sample

PATCH_VALUES = 3 * 2 * 4 * 4
START, END, IMAGE, VIDEO = 58, 59, 61, 62
TEXT_IDS = 58
"""Ids below are text in the tiny models."""


def random_image(seed: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> ImageInput:
    """Of height x width patches, both even."""
    values = np.random.default_rng(seed).standard_normal((height * width, PATCH_VALUES)).astype(np.float32)
    return images_of(torch.from_numpy(values).to(dtype), torch.tensor([[1, height, width]]))[0]


def run_of(image: ImageInput) -> tuple[int, ...]:
    """Start, placeholders, end."""
    _, height, width = image.grid_thw
    return (START, *[IMAGE] * (height * width // 4), END)


def prompt_of(*parts: ImageInput | int, seed: int = 0) -> tuple[int, ...]:
    """Images as runs, numbers as that many random text tokens."""
    ids: list[int] = []
    for i, part in enumerate(parts):
        drawn = np.random.default_rng((seed, i)).integers(2, TEXT_IDS, part if isinstance(part, int) else 0)
        ids += run_of(part) if isinstance(part, ImageInput) else drawn.tolist()
    return tuple(ids)


def image_sample(
    parts: Sequence[ImageInput | int], sample_id: str = "s", index: int = 0, **values: Any
) -> SampleRequest:
    """A request whose prompt is made of the parts."""
    images = tuple(p for p in parts if isinstance(p, ImageInput))
    seed = values.get("seed", 1)
    return replace(sample(prompt_of(*parts, seed=seed), sample_id, index, **values), images=images)
