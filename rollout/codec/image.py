"""Images of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout.codec.tensor import dtype_from_proto, dtype_to_proto
from rollout.errors import InvalidRequest
from rollout.images import ImageInput, check_image
from rollout.v1 import rollout_pb2 as pb


def add_images(container: Any, images: Iterable[ImageInput]) -> None:
    """Append to a repeated ``Image`` field.

    Raises:
        InvalidRequest: an image whose parts disagree.
    """
    for index, image in enumerate(images):
        check_image(image, f"images[{index}]")
        item = container.add()
        item.pixel_values.CopyFrom(
            pb.Tensor(dtype=dtype_to_proto(image.dtype), shape=image.shape, data=image.pixel_values)
        )
        item.grid_thw.extend(image.grid_thw)


def images_from_proto(messages: Iterable[pb.Image], prefix: str = "") -> tuple[ImageInput, ...]:
    """Images whose dtype, shape, grid and bytes agree.

    Raises:
        InvalidRequest: they do not, or a value is not finite.
    """
    return tuple(_image(message, f"{prefix}images[{index}]") for index, message in enumerate(messages))


def _image(message: pb.Image, field: str) -> ImageInput:
    tensor = message.pixel_values
    if len(tensor.shape) != 2 or len(message.grid_thw) != 3:
        raise InvalidRequest(
            f"{field} has pixel values of shape {list(tensor.shape)} and grid_thw {list(message.grid_thw)}; send "
            "[patches, values of one patch] and three numbers",
            field=field,
        )
    patches, values = tensor.shape
    time, height, width = message.grid_thw
    dtype = dtype_from_proto(tensor.dtype, f"{field}.pixel_values.dtype")
    return check_image(ImageInput(tensor.data, dtype, (patches, values), (time, height, width)), field)
