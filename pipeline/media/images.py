"""Decoding of images with Pillow: upright, RGB, 8 bits, shorter side at most `shortest_edge`, stored as PNG.

Transparent parts become white. 16-bit grey values are scaled to 8 bits. Colour profiles are ignored. Of an animation or
a file of several pages the first is taken.
"""

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np

from declutr.pipeline.media.decoding import Decoded, UndecodableError, UnsuitableError, library_message
from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.shards.content import ImagesContent
from declutr.pipeline.shards.media import MAX_PIXELS, Image
from declutr.pipeline.shards.windows import EMPTY

# Formats that are tried; Pillow's others include interpreters of documents.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_RATIO = 16  # a stored image is at most this many times `shortest_edge` long

# Errors that Pillow raises for damaged files.
PILLOW_ERRORS = (
    OSError,  # also UnidentifiedImageError, and a truncated file
    SyntaxError,  # a damaged chunk or marker
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    EOFError,
    RuntimeError,  # also NotImplementedError and RecursionError
    ArithmeticError,  # overflow, division by zero
    AssertionError,
    struct.error,
    zlib.error,
)
_PNG_LEVEL = 3  # a quarter of the time of the default level 6, for files that are a tenth larger
_WHITE = (255, 255, 255, 255)
_WIDE = 65535
_ORIENTATION, _TURNED = 0x0112, range(2, 9)  # tag of EXIF, and its values for which an image is turned or mirrored
_BAND_PIXELS = 1 << 20


def decode_image(data: bytes, content: ImagesContent, label: str) -> Decoded:
    """An image as the shards hold it.

    The size in the header is checked before any pixel is decoded. The result depends on the bytes and the settings.
    Pillow warns of damaged metadata, which are not used.
    """
    from PIL import Image as Pillow  # imported here because only images need it

    if not data:
        raise UnsuitableError(EMPTY, "the file has no bytes")
    notes: list[str] = []
    try:
        opened = Pillow.open(BytesIO(data), formats=FORMATS)
    except (Pillow.DecompressionBombError, *PILLOW_ERRORS) as error:
        raise _refused(error, "not_an_image") from error
    with opened:
        _check_size(opened.width, opened.height, content.shortest_edge)
        try:
            if getattr(opened, "is_animated", False):
                notes.append("first_frame")
                opened.seek(0)
            opened.load()
            image = _rgb(_upright(opened, notes))
        except (Pillow.DecompressionBombError, *PILLOW_ERRORS) as error:
            raise _refused(error, "undecodable") from error
    del opened  # it would hold the pixels in their first form
    if (size := _stored_size(image.width, image.height, content.shortest_edge)) != image.size:
        notes.append("smaller")
        image = image.resize(size, Pillow.Resampling.BICUBIC, reducing_gap=None)
    pixels = image.tobytes()
    # A new image, because `save` would also store a colour profile and the like.
    clean, stored = Pillow.frombytes("RGB", image.size, pixels), BytesIO()
    clean.save(stored, "PNG", compress_level=_PNG_LEVEL)
    width, height = image.size
    identity = document_id(f"{width} x {height}\n".encode() + pixels)
    return Decoded(Image(stored.getvalue(), width, height, label), identity, tuple(sorted(notes)))


def _stored_size(width: int, height: int, shortest_edge: int) -> tuple[int, int]:
    """Size in which an image is stored: its shorter side is at most `shortest_edge`."""
    shorter = min(width, height)
    if shorter <= shortest_edge:
        return width, height
    half = shorter // 2
    return (width * shortest_edge + half) // shorter, (height * shortest_edge + half) // shorter


def _check_size(width: int, height: int, shortest_edge: int) -> None:
    """Raises an error for the size in a header that is not decoded."""
    if width < 1 or height < 1:
        raise UndecodableError("undecodable", f"its header gives {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise UndecodableError(
            "too_many_pixels", f"its header gives {width} x {height} pixels, at most {MAX_PIXELS} are decoded"
        )
    if max(_stored_size(width, height, shortest_edge)) > MAX_RATIO * shortest_edge:
        raise UnsuitableError(
            "too_elongated", f"{width} x {height} pixels; the longer side may have {MAX_RATIO} * content.shortest_edge"
        )


def _upright(image: Any, notes: list[str]) -> Any:
    """The image turned as its EXIF data say; as it is if they are damaged."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image) if image.getexif().get(_ORIENTATION, 1) in _TURNED else image
    except PILLOW_ERRORS:
        notes.append("broken_exif")
        return image


def _rgb(image: Any) -> Any:
    """The image in RGB with 8 bits a channel, converted band by band to keep its copies small."""
    from PIL import Image as Pillow

    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode == "F":
        raise UndecodableError("undecodable", "its values are floating-point numbers of an unknown range")
    rows = max(1, _BAND_PIXELS // image.width)
    if rows >= image.height:
        return _rgb_band(image)
    whole = Pillow.new("RGB", image.size)
    for top in range(0, image.height, rows):
        bottom = min(image.height, top + rows)
        whole.paste(_rgb_band(image.crop((0, top, image.width, bottom))), (0, top))
    return whole


def _rgb_band(image: Any) -> Any:
    """The image in RGB with 8 bits a channel; 16-bit grey values are scaled."""
    from PIL import Image as Pillow

    if image.mode.startswith("I"):
        wide = np.asarray(image).astype(np.int64)
        if wide.min() < 0 or wide.max() > _WIDE:
            raise UndecodableError("undecodable", f"grey values {wide.min()} to {wide.max()}, not 0 to {_WIDE}")
        narrow = ((wide * 255 + _WIDE // 2) // _WIDE).astype(np.uint8)
        return Pillow.fromarray(narrow, "L").convert("RGB")
    if image.has_transparency_data:
        return Pillow.alpha_composite(Pillow.new("RGBA", image.size, _WHITE), image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _refused(error: BaseException, reason: str) -> UndecodableError:
    """The failure for an error of Pillow."""
    if isinstance(error, UndecodableError):
        return error
    message = library_message(error)
    if type(error).__name__ == "DecompressionBombError":
        reason = "too_many_pixels"
    elif "truncated" in message.lower():
        reason = "truncated"
    return UndecodableError(reason, f"{message} (Pillow)")
