"""Images among tokens: positions equal transformers' own, marks decide pages, misfits are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5_VLModel, Qwen3VLModel

from rollout.errors import InvalidRequest, RolloutError, UnsupportedFeature
from rollout.images import ImageInput
from rollout.placement import TEXT, Placement, VisionRules, place
from tests.images import IMAGE, PATCH_VALUES, VIDEO, prompt_of, random_image

RULES = VisionRules(IMAGE, (IMAGE, VIDEO), VIDEO, 2, PATCH_VALUES)
SIDES = st.sampled_from([2, 4, 6, 8])
PARTS = st.lists(st.one_of(st.integers(1, 9), st.tuples(SIDES, SIDES)), min_size=1, max_size=6)


class _Sizes:
    class vision_config:
        spatial_merge_size = 2
        tokens_per_second = 2


class _Bare:
    config = _Sizes
    get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids


def theirs(model: Any, ids: tuple[int, ...], images: tuple[ImageInput, ...]) -> tuple[np.ndarray, int]:
    """transformers' M-RoPE positions [3, n] and the shift of what follows."""
    tokens = torch.tensor([ids])
    bare: Any = _Bare()
    positions, delta = model.get_rope_index(
        bare, tokens, (tokens == IMAGE).int(), torch.tensor([i.grid_thw for i in images]) if images else None
    )
    return positions[:, 0].numpy(), int(delta)


def built(parts: list[Any]) -> tuple[tuple[int, ...], tuple[ImageInput, ...]]:
    whole = [random_image(i, *p) if isinstance(p, tuple) else p for i, p in enumerate(parts)]
    return prompt_of(*whole), tuple(p for p in whole if isinstance(p, ImageInput))


@settings(max_examples=60, deadline=None)
@given(PARTS, st.integers(0, 40), st.integers(0, 40))
def test_positions_are_those_of_transformers(parts: list[Any], a: int, b: int) -> None:
    ids, images = built(parts)
    placement = place(ids, images, RULES, "prompt_ids")
    for model in (Qwen2_5_VLModel, Qwen3VLModel):
        positions, delta = theirs(model, ids, images)
        assert np.array_equal(placement.rope(0, len(ids)), positions)
        assert placement.shift == (delta if images else 0)
    first, last = sorted((a, b))
    extended = np.concatenate((positions, np.stack([np.arange(len(ids), 99) + placement.shift] * 3)), axis=1)
    assert np.array_equal(placement.rope(first, last), extended[:, first:last]), "a chunk, and tokens sampled later"
    assert [ids[s.start - 1 : s.end + 1] for s in placement.spans] == [
        (58, *[IMAGE] * (s.end - s.start), 59) for s in placement.spans
    ]


def test_a_turned_image_has_other_positions() -> None:
    """Negative control: the sides of the grid matter."""
    wide, tall = random_image(1, 4, 8), random_image(1, 8, 4)
    ids = prompt_of(wide, 3)
    assert not np.array_equal(place(ids, [wide], RULES, "").rope(0, 12), place(ids, [tall], RULES, "").rope(0, 12))


def test_marks_name_place_and_pixels() -> None:
    image, other = random_image(1, 4, 8), random_image(2, 4, 8)
    ids = prompt_of(5, image, 20)
    ours, same, theirs_ = (place(ids, [i], RULES, "") for i in (image, random_image(1, 4, 8), other))
    (span,) = ours.spans
    assert ours.marks(0, span.start) == ours.marks(span.end, 40) == () == TEXT.marks(0, 99)
    for first, last in ((0, 16), (span.start, span.end), (span.end - 1, 40), (8, 9)):
        assert ours.marks(first, last) == same.marks(first, last) != theirs_.marks(first, last)
        assert len(ours.marks(first, last)) == 5 and ours.marks(first, last)[0] == span.start - first


def test_the_digest_covers_grid_shape_and_dtype() -> None:
    image = random_image(1, 4, 8)
    half = ImageInput(image.pixel_values, "bfloat16", (32, 2 * PATCH_VALUES), (1, 4, 8))
    changed = [
        replace(image, grid_thw=(1, 8, 4)),
        replace(image, shape=(16, 2 * PATCH_VALUES)),
        half,
        replace(half, dtype="float16"),
        replace(image, pixel_values=bytes(len(image.pixel_values))),
    ]
    assert len({i.digest for i in (image, *changed)}) == 6 and image.digest == random_image(1, 4, 8).digest


WIDE = random_image(1, 4, 8)
REFUSED: list[tuple[type[RolloutError], str, tuple[int, ...], tuple[ImageInput, ...]]] = [
    (InvalidRequest, "1 runs of image placeholders .* 0 images", prompt_of(3, WIDE), ()),
    (InvalidRequest, "0 runs of image placeholders .* 1 images", (5, 6), (WIDE,)),
    (InvalidRequest, "1 runs of image placeholders .* 2 images", (4, *[IMAGE] * 16, 5), (WIDE, WIDE)),
    (InvalidRequest, "run at token 1 has 3 placeholders", (58, *[IMAGE] * 3, 59), (WIDE,)),
    (InvalidRequest, "run at token 1 has 9 placeholders", (58, *[IMAGE] * 9, 59), (WIDE,)),
    (InvalidRequest, "multiples of 2", (58, *[IMAGE] * 8, 59), (replace(WIDE, grid_thw=(1, 1, 32)),)),
    (InvalidRequest, "product is the number of patches", (58, *[IMAGE] * 8), (replace(WIDE, grid_thw=(1, 4, 6)),)),
    (InvalidRequest, "patches of 48 values", (58, *[IMAGE] * 16), (replace(WIDE, shape=(64, 48), grid_thw=(1, 8, 8)),)),
    (UnsupportedFeature, "videos are not supported", (58, *[IMAGE] * 8), (replace(WIDE, grid_thw=(2, 4, 4)),)),
    (UnsupportedFeature, r"prompt_ids\[2\] is the video placeholder", (5, 6, VIDEO), ()),
    (InvalidRequest, "has 96 bytes", (IMAGE,), (replace(WIDE, pixel_values=bytes(96)),)),
    (InvalidRequest, "dtype 'int8'", (IMAGE,), (replace(WIDE, dtype="int8"),)),
]


@pytest.mark.parametrize(("error", "match", "ids", "images"), REFUSED)
def test_refusals(error: type[RolloutError], match: str, ids: tuple[int, ...], images: tuple[ImageInput, ...]) -> None:
    with pytest.raises(error, match=match):
        place(ids, images, RULES, "prompt_ids")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_pixels_must_be_finite(dtype: torch.dtype, value: float) -> None:
    image = random_image(1, 4, 8, dtype)
    ids = prompt_of(image)
    assert place(ids, [image], RULES, "").spans
    bad = torch.tensor([value]).to(dtype).view(torch.uint8).numpy().tobytes()
    spoiled = replace(image, pixel_values=image.pixel_values[: -len(bad)] + bad)
    with pytest.raises(InvalidRequest, match="not finite"):
        place(ids, [spoiled], RULES, "")


def test_a_text_model_takes_no_image() -> None:
    assert place((1, IMAGE), (), None, "prompt_ids") is TEXT
    with pytest.raises(UnsupportedFeature, match="1 images were sent to a text model"):
        place((1, IMAGE), (WIDE,), None, "prompt_ids")


def test_text_on_a_multimodal_model_counts_in_all_three() -> None:
    placement: Placement = place((5, 6, 7), (), RULES, "prompt_ids")
    assert placement.rope(1, 4).tolist() == [[1, 2, 3]] * 3 and placement.shift == 0
