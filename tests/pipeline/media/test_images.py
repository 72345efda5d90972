"""Images of every kind as RGB, upright and small; and what is said of bad ones."""

import io
import time

import numpy as np
import pytest
from mediafiles import RED, animated, claimed_png, picture, png, statuses_of_damaged, stored, upright_wrong
from PIL import Image, ImageOps

from declutr.pipeline.media.decoded import UndecodableError, UnsuitableError
from declutr.pipeline.media.images import MAX_RATIO, decode_image
from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.shards.content import ImagesContent
from declutr.pipeline.shards.media import MAX_PIXELS

pytestmark = pytest.mark.filterwarnings("ignore")  # of Pillow, as in the process that decodes
CONTENT = ImagesContent(kind="images", shortest_edge=32)


def pixels(data, content=CONTENT):
    """The pixels of the stored PNG."""
    decoded = decode_image(data, content, "")
    opened = Image.open(io.BytesIO(decoded.media.png), formats=["PNG"])
    assert opened.mode == "RGB"
    assert opened.size == (decoded.media.width, decoded.media.height)
    assert set(opened.info) == set()
    return np.asarray(opened)


def test_small_image_keeps_its_pixels():
    assert (pixels(png(3)) == np.asarray(picture(3))).all()
    assert (pixels(png(3, (1, 1))) == np.asarray(picture(3, (1, 1)))).all()
    assert decode_image(png(3), CONTENT, "").notes == ()


@pytest.mark.parametrize("size", [(200, 100), (100, 201), (64, 64), (33, 500), (32, 90), (1000, 999)])
def test_a_larger_image_has_its_shorter_side_at_the_limit(size):
    decoded = decode_image(png(1, size), CONTENT, "")
    width, height = decoded.media.width, decoded.media.height
    assert min(width, height) == 32
    assert abs(max(width, height) - 32 * max(size) / min(size)) <= 0.5
    assert (width > height) == (size[0] > size[1]) or width == height
    expected = picture(1, size)
    if min(size) > 32:
        expected = expected.resize((width, height), Image.Resampling.BICUBIC)
        assert decoded.notes == ("smaller",)
    assert (pixels(png(1, size)) == np.asarray(expected)).all()


def test_exif_turns_the_image_once_and_is_not_stored():
    data = upright_wrong(2)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert pixels(data).shape == expected.shape == (40, 30, 3)
    assert (pixels(data) == expected).all()


def test_transparency_becomes_white_and_other_modes_become_rgb():
    image = Image.new("RGBA", (4, 2), (*RED, 255))
    image.putpixel((1, 1), (*RED, 0))
    image.putpixel((2, 1), (0, 0, 0, 128))
    found = pixels(stored(image))
    assert tuple(found[0, 0]) == RED
    assert tuple(found[1, 1]) == (255, 255, 255)
    assert 120 <= found[1, 2, 0] <= 135
    palette = picture(4).quantize(16)
    assert (pixels(stored(palette)) == np.asarray(palette.convert("RGB"))).all()
    assert pixels(stored(palette, transparency=0)).max() == 255
    grey = picture(5).convert("L")
    assert (pixels(stored(grey)) == np.asarray(grey)[:, :, None]).all()
    inks = picture(6).convert("CMYK")
    assert (pixels(stored(inks, "TIFF")) == np.asarray(inks.convert("RGB"))).all()
    assert (pixels(stored(picture(7).convert("1"))) % 255 == 0).all()


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_not_cut_off(format):
    wide = np.array([[0, 256, 257, 32768, 65535]], np.uint16)
    found = pixels(stored(Image.fromarray(wide), format))
    assert found[0, :, 0].tolist() == [0, 1, 1, 128, 255]


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_is_taken_and_counted(format):
    decoded = decode_image(animated(format), CONTENT, "")
    assert "first_frame" in decoded.notes
    first = Image.open(io.BytesIO(animated(format)))
    assert (pixels(animated(format)) == np.asarray(first.convert("RGB"))).all()


def test_the_id_is_of_pixels_and_size_not_of_the_file_or_the_label():
    one, other = decode_image(png(1), CONTENT, "cat"), decode_image(stored(picture(1), "BMP"), CONTENT, "dog")
    assert one.id == other.id == document_id(b"40 x 30\n" + picture(1).tobytes())
    turned = Image.frombytes("RGB", (30, 40), picture(1).tobytes())
    assert decode_image(stored(turned), CONTENT, "").id != one.id
    assert decode_image(png(1), CONTENT, "") == decode_image(png(1), CONTENT, "")


LARGE = stored(picture(9, (300, 200)), "JPEG")
BAD = {
    "no bytes": (b"", "empty"),
    "a text": (b"not an image at all\n" * 20, "not_an_image"),
    "a truncated jpeg": (LARGE[: len(LARGE) // 2], "truncated"),
    "a truncated png": (png(1, (300, 200))[:5000], "truncated"),
    "a header alone": (png(1)[:40], "not_an_image"),
    "a bomb of the claimed size": (claimed_png(60_000, 60_000), "too_many_pixels"),
    "just above the limit": (claimed_png(MAX_PIXELS + 1, 1), "too_many_pixels"),
    "2**31 pixels wide": (claimed_png(2**31 - 1, 2**31 - 1), "too_many_pixels"),
    "a large image with few data": (claimed_png(9_000, 9_000), "truncated"),
    "no width": (claimed_png(0, 10), "not_an_image"),
    "a thread": (png(1, (32 * MAX_RATIO + 1, 1)), "too_elongated"),
    "a long strip": (png(1, (40 * MAX_RATIO, 33)), "too_elongated"),
    "floating point": (stored(picture(1).convert("F"), "TIFF"), "undecodable"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not_an_image"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_have_a_reason(name):
    data, reason = BAD[name]
    started = time.process_time()
    with pytest.raises((UndecodableError, UnsuitableError)) as caught:
        decode_image(data, CONTENT, "")
    assert caught.value.reason == reason
    assert len(str(caught.value)) < 300
    assert time.process_time() - started < 5


def test_a_strip_at_the_limit_is_kept():
    assert decode_image(png(1, (32 * MAX_RATIO, 32)), CONTENT, "").media.size == 32 * 32 * MAX_RATIO


def test_damage_gives_a_reason_and_never_another_error():
    bases = [LARGE, png(1), animated(), animated("WEBP"), upright_wrong(), stored(picture(1), "TIFF"), LARGE[:900]]
    statuses = statuses_of_damaged(bases, lambda data: decode_image(data, CONTENT, ""), times=400, reach=300)
    assert {"kept", "not_an_image", "undecodable"} <= statuses
