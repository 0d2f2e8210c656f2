"""Images in files' bytes as tensors: by simplejpeg where that gives Pillow's pixels, else by Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from hasten.errors import HastenError

_JPEG = b"\xff\xd8\xff"


class ImageError(HastenError, ValueError):
    """An image that cannot be decoded; `number` says which of the batch it is."""

    def __init__(self, message: str, number: int = 0) -> None:  # rebuilt from its text where a worker raised it
        super().__init__(message, 'DataLoader(on_error="skip") leaves such samples out')
        self.number = number


def decode(values: list[Any], name: str) -> Any:
    """Return the images as RGB: one uint8 tensor, batch x channels x height x width, or a list where sizes differ.

    Args:
        values: Bytes of the files.
        name: Of the column, for messages.

    Raises:
        ImageError: One is no image, is damaged, or has more pixels than Pillow's limit.
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
    """Return height x width x 3.

    Args:
        value: Bytes of the file.
        fast: The module simplejpeg, if it is there.
        limit: Pixels up to which it may decode.
    """
    from PIL import Image

    if fast is not None and value.startswith(_JPEG):
        try:
            height, width, space, _ = fast.decode_jpeg_header(value, strict=True)
            plain = space in ("YCbCr", "Gray")  # CMYK is Pillow's, with its inversion by Adobe's marker
            # fastdct and fastupsample are quicker by nothing and change pixels.
            if plain and (limit is None or height * width <= limit):
                return fast.decode_jpeg(value, colorspace="RGB", fastdct=False, fastupsample=False, strict=True)
        except ValueError:
            pass  # damaged: Pillow decides, whether it is an error and what is left of it
    with Image.open(io.BytesIO(value)) as image:
        return np.asarray(image.convert("RGB"))


def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg
