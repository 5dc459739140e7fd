"""An image as a request carries it: raw pixels in patches, as a Hugging Face image processor makes them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from rollout.errors import InvalidRequest

PIXEL_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""dtype of pixel values -> bytes of one."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image. Both sides get these very bytes, so both compute the same features."""

    pixel_values: bytes
    """little-endian, C order"""
    dtype: str
    """a key of ``PIXEL_BYTES``; cast once to the tower's dtype"""
    shape: tuple[int, int]
    """patches, values of one patch"""
    grid_thw: tuple[int, int, int]
    """patches along time, height and width; their product is the number of patches"""

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for pixels, dtype, shape and grid."""
        head = repr((self.dtype, self.shape, self.grid_thw)).encode()
        return hashlib.blake2b(len(head).to_bytes(8, "little") + head + self.pixel_values, digest_size=32).digest()


def check_image(image: ImageInput, field: str) -> ImageInput:
    """Refuse an image whose parts disagree; what a model needs beyond that, ``placement.place`` checks.

    Raises:
        InvalidRequest: naming the part, the value and what would fit.
    """
    if image.dtype not in PIXEL_BYTES:
        raise InvalidRequest(
            f"{field} has pixel values of dtype {image.dtype!r}; send {', '.join(PIXEL_BYTES)}",
            field=f"{field}.pixel_values",
        )
    if len(image.shape) != 2 or min(image.shape) < 1:
        raise InvalidRequest(
            f"{field} has pixel values of shape {list(image.shape)}; send [patches, values of one patch], as the "
            "model's image processor makes them",
            field=f"{field}.pixel_values",
        )
    wanted = image.shape[0] * image.shape[1] * PIXEL_BYTES[image.dtype]
    if wanted != len(image.pixel_values):
        raise InvalidRequest(
            f"{field} has {len(image.pixel_values)} bytes; shape {list(image.shape)} of {image.dtype} takes {wanted}",
            field=f"{field}.pixel_values",
        )
    grid = image.grid_thw
    if len(grid) != 3 or min(grid) < 1 or math.prod(grid) != image.shape[0]:
        raise InvalidRequest(
            f"{field} has grid_thw {list(grid)} for {image.shape[0]} patches; send three numbers >= 1 (time, height, "
            "width) whose product is the number of patches",
            field=f"{field}.grid_thw",
        )
    if not _finite(image):
        raise InvalidRequest(
            f"{field} holds pixel values that are not finite; one would spoil every log-prob after it",
            field=f"{field}.pixel_values",
        )
    return image


def _finite(image: ImageInput) -> bool:
    if image.dtype == "bfloat16":
        # All bits of the exponent set: infinite or NaN.
        return not bool(((np.frombuffer(image.pixel_values, "<u2") & 0x7F80) == 0x7F80).any())
    kind = {"float32": "<f4", "float16": "<f2"}[image.dtype]
    return bool(np.isfinite(np.frombuffer(image.pixel_values, kind)).all())
