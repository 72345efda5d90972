"""Files that would take gigabytes or hours are failures of their own, and their neighbours are read."""

import numpy as np
import pytest
from mediafiles import blank_webp, commented_ppm, png, repeated_scans, sound, stored, tone, wide_tile
from PIL import Image

from declutr.pipeline.media.decoded import Limits
from declutr.pipeline.media.images import decode_image
from declutr.pipeline.media.media_rows import media_rows
from declutr.pipeline.readers.corpus import Blob, ReadFailure, Rejected
from declutr.pipeline.shards.content import AudioContent, ImagesContent

IMAGES = ImagesContent(kind="images", shortest_edge=32)


def blobs(*files):
    return iter([Blob("", f"a/{number}", number, data, None) for number, data in enumerate(files)])


def statuses(records):
    return [record.reason if isinstance(record, ReadFailure | Rejected) else "kept" for record in records]


@pytest.mark.slow
def test_an_image_that_needs_gigabytes_is_a_failure():
    records = list(media_rows(blobs(png(1), blank_webp(9400, 9400), png(2)), IMAGES))
    assert statuses(records) == ["kept", "too_much_memory", "kept"]
    assert "1280 MiB" in records[1].message
    assert [record.offset for record in records] == [0, 1, 2]


def test_the_size_of_a_tile_is_bounded_whatever_the_size_of_the_image():
    small, large = statuses(media_rows(blobs(wide_tile(64), wide_tile(9000)), IMAGES, Limits(memory_mib=64)))
    assert small == "kept"
    assert large in ("too_much_memory", "undecodable")  # libtiff reports an error of its own


@pytest.mark.slow
def test_an_image_that_needs_hours_is_a_failure():
    slow = repeated_scans(3000, 3000), commented_ppm(2 << 20)
    files = png(1), slow[0], png(2), slow[1], png(3)
    records = list(media_rows(blobs(*files), IMAGES, Limits(cpu_seconds=0.5)))
    assert statuses(records) == ["kept", "too_slow", "kept", "too_slow", "kept"]
    assert [record.id for record in records[::2]] == [record.id for record in media_rows(blobs(*files[::2]), IMAGES)]


def test_wide_values_and_transparency_take_no_further_copies():
    wide = stored(Image.fromarray(np.full((5000, 5000), 1 << 15, np.uint16)))
    clear = stored(Image.new("RGBA", (4000, 4000), (0, 0, 0, 128)))
    assert statuses(media_rows(blobs(wide, clear), IMAGES, Limits(memory_mib=240))) == ["kept", "kept"]


def test_a_reader_that_stops_early_leaves_no_answers_for_the_next():
    reading = media_rows(blobs(*[png(number) for number in range(200)]), IMAGES)
    assert next(reading).offset == 0
    reading.close()
    (row,) = media_rows(blobs(png(5)), IMAGES)
    assert row.id == decode_image(png(5), IMAGES, "").id


def test_sounds_and_images_take_turns():
    content = AudioContent(kind="audio", max_seconds=1.0)
    for _ in range(2):
        assert statuses(media_rows(blobs(sound(tone()), b"no sound", b""), content)) == ["kept", "not_audio", "empty"]
        assert statuses(media_rows(blobs(png(1), b"no image", b""), IMAGES)) == ["kept", "not_an_image", "empty"]
