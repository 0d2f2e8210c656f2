"""Decodes images to tensors: with simplejpeg where it gives the same pixels as Pillow, else with Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from hasten.errors import HastenError

_JPEG = b"\xff\xd8\xff"


class ImageError(HastenError, ValueError):
    """An image that cannot be decoded; `number` is its place in the batch."""

    # torch rebuilds an exception from a worker with its message alone, hence the default for `number`.
    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message, 'DataLoader(on_error="skip") leaves such samples out')
        self.number = number


def import_decoders() -> None:
    """Import what decodes images: once, and not in each forked worker of each epoch.

    Raises:
        HastenError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise HastenError(
            "images are decoded by Pillow, which is not installed", "pip install 'hasten[images]'"
        ) from None
    _simplejpeg()


def decode(values: list[Any], name: str) -> Any:
    """Return the images as RGB: one uint8 tensor, batch x channels x height x width, or a list if sizes differ.

    Args:
        values: The encoded images.
        name: Name of the column, for messages.

    Raises:
        ImageError: A value is not an image, is damaged, or has more pixels than Pillow's limit.
    """
    from PIL import Image

    fast, limit = _simplejpeg(), Image.MAX_IMAGE_PIXELS
    images = []
    for number, value in enumerate(values):
        try:
            if value is None:
                raise ValueError("it is null")
            images.append(_pixels(value, fast, limit))
        except Exception as error:
            raise ImageError(f"no image in column {name!r}: {type(error).__name__}: {error}", number) from error
    if len({image.shape for image in images}) > 1:
        return [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in images]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def _pixels(value: bytes, fast: Any, limit: int | None) -> Any:
    """Return the pixels, height x width x 3.

    Args:
        value: The encoded image.
        fast: The module simplejpeg, if installed.
        limit: Most pixels that simplejpeg may decode; Pillow raises for larger images.
    """
    from PIL import Image

    if fast is not None and value.startswith(_JPEG):
        try:
            height, width, space, _ = fast.decode_jpeg_header(value, strict=True)
            plain = space in ("YCbCr", "Gray")  # leave CMYK to Pillow, which inverts it as Adobe's marker says
            # fastdct and fastupsample bring no measurable speed and change pixels.
            if plain and (limit is None or height * width <= limit):
                return fast.decode_jpeg(value, colorspace="RGB", fastdct=False, fastupsample=False, strict=True)
        except ValueError:
            pass  # damaged: let Pillow decide whether that is an error or how much of the image it can decode
    with Image.open(io.BytesIO(value)) as image:
        return np.asarray(image.convert("RGB"))


def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg
