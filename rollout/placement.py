"""Where a sequence's images stand among its tokens, and the positions that M-RoPE gives every token.

Pure functions of token ids, images and the model's rules, used by admission, the engine and the training forward.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest, UnsupportedFeature
from rollout.images import ImageInput, check_image

Int64Array = npt.NDArray[np.int64]
MARK = 5
"""Numbers that ``Placement.marks`` says of an image: its place, then 32 bytes of digest."""


@dataclass(frozen=True, slots=True)
class VisionRules:
    """What a multimodal model asks of token ids and images."""

    image_token_id: int
    """the placeholder: one for each feature of an image"""
    never_sampled: tuple[int, ...]
    """placeholders of images and videos: a sampled one would stand for no pixels, and no trainer could score it"""
    video_token_id: int
    merge: int
    """patches along each side that make one feature"""
    patch_values: int
    """values of one patch: channels, frames, height, width"""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image and its run of placeholders."""

    image: ImageInput
    digest: bytes
    """the image's, [32]"""
    start: int
    """index of the first placeholder"""
    grid: tuple[int, int]
    """features along height and width"""

    @property
    def end(self) -> int:
        """One past the last placeholder."""
        return self.start + self.grid[0] * self.grid[1]


@dataclass(frozen=True, slots=True)
class Placement:
    """Images of one sequence. Tokens after the last one known here are text."""

    spans: tuple[ImageSpan, ...] = ()
    """in order, apart from each other"""
    positions: Int64Array = field(default_factory=lambda: np.empty((3, 0), np.int64))
    """[3, n] time, height and width of tokens up to the end of the last image"""
    shift: int = 0
    """what is added to a later token's index"""

    def rope(self, first: int, last: int) -> Int64Array:
        """[3, last - first] M-RoPE positions of tokens [first, last)."""
        known = self.positions[:, first : min(last, self.positions.shape[1])]
        text = np.arange(max(first, self.positions.shape[1]), last, dtype=np.int64) + self.shift
        return np.concatenate((known, np.broadcast_to(text, (3, max(0, len(text))))), axis=1)

    def marks(self, first: int, last: int) -> tuple[int, ...]:
        """What tokens [first, last) are besides their ids: for every image in there, its place and its digest.

        Together with the ids before and in the range it decides the content of a KV page. ``MARK`` numbers an image.
        """
        marks: list[int] = []
        for span in self.spans:
            if span.start < last and first < span.end:
                marks += [span.start - first, *struct.unpack("<4q", span.digest)]
        return tuple(marks)


TEXT = Placement()


def place(token_ids: Sequence[int], images: Sequence[ImageInput], rules: VisionRules | None, what: str) -> Placement:
    """Match runs of placeholders with images, in order.

    Args:
        rules: the model's; None for a model without a vision tower.
        what: the request's field that holds the ids, for messages.

    Raises:
        UnsupportedFeature: an image for a text model; a video. InvalidRequest: an image that does not fit the model,
            its run of placeholders, or the number of runs.
    """
    if rules is None:
        if images:
            raise UnsupportedFeature(
                f"{len(images)} images were sent to a text model; leave them out, or serve one of Qwen2.5-VL, Qwen3-VL",
                field="images",
            )
        return TEXT
    ids = np.asarray(token_ids, np.int64)
    if len(video := np.flatnonzero(ids == rules.video_token_id)):
        raise UnsupportedFeature(
            f"{what}[{video[0]}] is the video placeholder {rules.video_token_id}: videos are not supported; send "
            "frames as images",
            field=what,
        )
    held = np.flatnonzero(ids == rules.image_token_id)
    breaks = np.flatnonzero(np.diff(held) > 1)
    starts, ends = held[np.r_[0, breaks + 1]] if len(held) else held, held[np.r_[breaks, -1]] + 1 if len(held) else held
    if len(starts) != len(images):
        raise InvalidRequest(
            f"{what} has {len(starts)} runs of image placeholders (id {rules.image_token_id}) and {len(images)} images "
            "were sent; send one image a run, in order, with another token between two runs",
            field="images",
        )
    spans = []
    for i, (image, start, end) in enumerate(zip(images, starts.tolist(), ends.tolist(), strict=True)):
        spans.append(_span(image, start, end - start, rules, f"images[{i}]"))
    return _positioned(tuple(spans))


def _span(image: ImageInput, start: int, run: int, rules: VisionRules, name: str) -> ImageSpan:
    check_image(image, name)
    time, height, width = image.grid_thw
    if time != 1:
        raise UnsupportedFeature(
            f"{name} has {time} steps of time: videos are not supported; send frames as images, each with time 1",
            field=f"{name}.grid_thw",
        )
    if height % rules.merge or width % rules.merge:
        raise InvalidRequest(
            f"{name} has {height} x {width} patches; both must be multiples of {rules.merge}, which the model merges",
            field=f"{name}.grid_thw",
        )
    if image.shape[1] != rules.patch_values:
        raise InvalidRequest(
            f"{name} has patches of {image.shape[1]} values, the model's have {rules.patch_values}",
            field=f"{name}.pixel_values",
        )
    grid = height // rules.merge, width // rules.merge
    if grid[0] * grid[1] != run:
        raise InvalidRequest(
            f"{name} makes {grid[0]} x {grid[1]} = {grid[0] * grid[1]} features, and its run at token {start} has "
            f"{run} placeholders; send as many of id {rules.image_token_id}",
            field=f"{name}.grid_thw",
        )
    return ImageSpan(image, image.digest, start, grid)


def _positioned(spans: tuple[ImageSpan, ...]) -> Placement:
    """Text counts on in all three; an image's features count along its sides, and the text after goes on from the
    longer one (Qwen2-VL, Wang et al. 2024)."""
    parts: list[Int64Array] = []
    token = position = 0
    for span in spans:
        text = np.arange(position, position + span.start - token, dtype=np.int64)
        position += span.start - token
        rows, columns = np.indices(span.grid).reshape(2, -1)
        parts += [np.stack([text] * 3), np.stack([np.zeros_like(rows), rows, columns]) + position]
        token, position = span.end, position + max(span.grid)
    if not parts:
        return TEXT
    return Placement(spans, np.concatenate(parts, axis=1), position - token)
