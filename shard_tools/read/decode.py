"""From payload bytes to what a training wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shard_tools.errors import BadInput, Missing

Decoder = Callable[[bytes], Any]


class DecodeError(BadInput):
    """A sample's bytes are not what the decoder expects."""


def decoder(decode: str | Decoder | None) -> Decoder | None:
    """The function for a ``decode`` argument; None gives the bytes as they are.

    Raises:
        BadInput: an unknown name.
        Missing: the decoder's library is not installed.
    """
    if decode is None or decode == "raw":
        return None
    if callable(decode):
        return decode
    if decode == "pillow":
        return pillow
    if decode == "simplejpeg":
        return _simplejpeg()
    raise BadInput(f"'{decode}' is no decoder", "use None, 'pillow', 'simplejpeg' or a function of bytes")


def pillow(data: bytes) -> Any:
    """Decode with Pillow.

    Returns:
        An RGB image, loaded.

    Raises:
        DecodeError: the bytes are no whole image.
    """
    import io

    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DecodeError(f"no whole image: {error}") from error


def simplejpeg(data: bytes) -> Any:
    """Decode a JPEG.

    Returns:
        uint8 array of height x width x 3, RGB.

    Raises:
        DecodeError: the bytes are no whole JPEG.
    """
    import simplejpeg as library

    try:
        return library.decode_jpeg(data, colorspace="RGB")
    except ValueError as error:
        raise DecodeError(f"no whole JPEG: {error}") from error


def _simplejpeg() -> Decoder:
    from importlib.util import find_spec

    if find_spec("simplejpeg") is None:
        raise Missing("simplejpeg is not installed", "pip install simplejpeg, or use decode='pillow'")
    return simplejpeg
