"""Images and sounds of every kind; bad ones and bombs have a reason, and their neighbours are read."""

import io
import signal
import struct
import time
import warnings
from functools import partial

import mediafiles
import numpy as np
import psutil
import pytest
from mediafiles import RED, animated, claimed_png, picture, png, sound, statuses_of_damaged, stored, tone, upright_wrong
from PIL import Image, ImageOps
from processes import until

from declutr.pipeline.media import decoding
from declutr.pipeline.media.clips import decode_clip, frame_samples, log_mel
from declutr.pipeline.media.decoding import Limits, UndecodableError, UnsuitableError
from declutr.pipeline.media.images import MAX_RATIO, decode_image
from declutr.pipeline.media.media_rows import media_rows
from declutr.pipeline.readers.corpus import Blob, ReadFailure, Rejected, document_id
from declutr.pipeline.shards.content import AudioContent, ImagesContent
from declutr.pipeline.shards.media import MAX_PIXELS

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # of Pillow, as in the process that decodes
CONTENT = ImagesContent(kind="images", shortest_edge=32)
AUDIO = AudioContent(kind="audio", max_seconds=2.0)


decode_an_image = partial(decode_image, content=CONTENT, label="")
decode_a_clip = partial(decode_clip, content=AUDIO, label="")


def frames(data):
    return decode_a_clip(data).media.frames


def pixels(data):
    media = decode_an_image(data).media
    opened = Image.open(io.BytesIO(media.png), formats=["PNG"])
    assert (opened.mode, opened.size, opened.info) == ("RGB", (media.width, media.height), {})
    return np.asarray(opened)


@pytest.mark.parametrize("size", [(200, 100), (100, 201), (64, 64), (33, 500), (32, 90), (1000, 999)])
def test_a_larger_image_has_its_shorter_side_at_the_limit(size):
    decoded = decode_an_image(png(1, size))
    small = width, height = decoded.media.width, decoded.media.height
    assert min(small) == 32
    assert abs(max(small) - 32 * max(size) / min(size)) <= 0.5
    assert (width > height) == (size[0] > size[1]) or width == height
    assert min(size) == 32 or decoded.notes == ("smaller",)
    expected = picture(1, size) if min(size) == 32 else picture(1, size).resize(small, Image.Resampling.BICUBIC)
    assert (pixels(png(1, size)) == np.asarray(expected)).all()


def test_a_small_image_keeps_its_pixels_exif_turns_it_once_transparency_becomes_white_and_other_modes_rgb():
    data = upright_wrong(2)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert pixels(data).shape == expected.shape == (40, 30, 3)
    assert (pixels(data) == expected).all()
    image = Image.new("RGBA", (4, 2), (*RED, 255))
    image.putpixel((1, 1), (*RED, 0))
    image.putpixel((2, 1), (0, 0, 0, 128))
    opaque = pixels(stored(image))
    assert (tuple(opaque[0, 0]), tuple(opaque[1, 1])) == (RED, (255, 255, 255))
    assert 120 <= opaque[1, 2, 0] <= 135
    palette = picture(4).quantize(16)
    assert (pixels(stored(palette)) == np.asarray(palette.convert("RGB"))).all()
    assert pixels(stored(palette, transparency=0)).max() == 255
    grey = picture(5).convert("L")
    assert (pixels(stored(grey)) == np.asarray(grey)[:, :, None]).all()
    inks = picture(6).convert("CMYK")
    assert (pixels(stored(inks, "TIFF")) == np.asarray(inks.convert("RGB"))).all()
    assert (pixels(stored(picture(7).convert("1"))) % 255 == 0).all()
    for size in ((40, 30), (1, 1)):
        assert (pixels(png(3, size)) == np.asarray(picture(3, size))).all()
    assert decode_an_image(png(3)).notes == ()
    assert decode_an_image(png(1, (32 * MAX_RATIO, 32))).media.size == 32 * 32 * MAX_RATIO


def test_sixteen_bits_are_scaled_and_not_cut_off_and_the_first_frame_is_taken_and_counted():
    wide = Image.fromarray(np.array([[0, 256, 257, 32768, 65535]], np.uint16))
    for format in ("PNG", "TIFF"):
        assert pixels(stored(wide, format))[0, :, 0].tolist() == [0, 1, 1, 128, 255]
    for format in ("GIF", "PNG", "WEBP", "TIFF"):
        data = animated(format)
        assert "first_frame" in decode_an_image(data).notes
        assert (pixels(data) == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))).all()


def test_the_id_is_of_pixels_or_frames_not_of_the_file_or_the_label():
    one, other = decode_image(png(1), CONTENT, "cat"), decode_image(stored(picture(1), "BMP"), CONTENT, "dog")
    assert one.id == other.id == document_id(b"40 x 30\n" + picture(1).tobytes())
    assert decode_an_image(stored(Image.frombytes("RGB", (30, 40), picture(1).tobytes()))).id != one.id
    assert decode_an_image(png(1)) == decode_an_image(png(1))
    whole = (tone() * 20_000).astype(np.int16)
    wav, flac = (decode_clip(sound(whole, format=f, subtype="PCM_16"), AUDIO, f) for f in ("WAV", "FLAC"))
    assert wav.id == flac.id != decode_clip(sound(tone(number=1)), AUDIO, "a").id


LARGE = stored(picture(9, (300, 200)), "JPEG")
BAD = {
    "no bytes": (b"", "empty"), "a text": (b"not an image at all\n" * 20, "not_an_image"),
    "a truncated jpeg": (LARGE[: len(LARGE) // 2], "truncated"),
    "a truncated png": (png(1, (300, 200))[:5000], "truncated"), "a header alone": (png(1)[:40], "not_an_image"),
    "a bomb of the claimed size": (claimed_png(60_000, 60_000), "too_many_pixels"),
    "just above the limit": (claimed_png(MAX_PIXELS + 1, 1), "too_many_pixels"),
    "2**31 pixels wide": (claimed_png(2**31 - 1, 2**31 - 1), "too_many_pixels"),
    "a large image with few data": (claimed_png(9_000, 9_000), "truncated"),
    "no width": (claimed_png(0, 10), "not_an_image"), "a thread": (png(1, (32 * MAX_RATIO + 1, 1)), "too_elongated"),
    "a long strip": (png(1, (40 * MAX_RATIO, 33)), "too_elongated"),
    "floating point": (stored(picture(1).convert("F"), "TIFF"), "undecodable"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not_an_image"),
}  # fmt: skip


TONE = frames(sound(tone(), subtype="DOUBLE"))


def test_frames_are_those_of_ast():
    from transformers import ASTFeatureExtractor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one of its 128 filters is narrower than a frequency bin
        extractor = ASTFeatureExtractor(do_normalize=False, max_length=512)
    for number in range(4):
        samples = tone(0.3 + number, number=number)[:, 0].astype(np.float32)
        samples -= samples.mean()
        mel = log_mel(samples.astype(np.float64), AUDIO)
        padded = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_values"][0]
        assert mel.shape == (1 + (len(samples) - 400) // 160, 128)
        assert abs(mel - padded[: len(mel)]).max() < 1e-5
        assert (padded[len(mel) :] == 0).all()


@pytest.mark.parametrize(
    ("format", "subtype", "within"),
    [("WAV", "FLOAT", 1e-3), ("WAV", "PCM_24", 0.05), ("FLAC", "PCM_24", 0.05), ("RF64", "PCM_32", 0.01)],
)
def test_formats_give_the_same_frames(format, subtype, within):
    assert abs(frames(sound(tone(), format=format, subtype=subtype)) - TONE).max() < within


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_ogg_has_the_frames_of_its_source(subtype):
    lossy, loud = frames(sound(tone(), format="OGG", subtype=subtype)), TONE.max() - 4 < TONE
    assert abs(len(lossy) - len(TONE)) <= 2
    assert np.median(abs(lossy[: len(TONE)] - TONE[: len(lossy)])[loud[: len(lossy)]]) < 0.5


def test_clip_is_averaged_over_channels_and_cut_and_one_frame_is_enough():
    both = tone(channels=2)
    both[:, 1] = tone(number=3)[:, 0]
    assert (frames(sound(both, subtype="DOUBLE")) == frames(sound(both.mean(axis=1), subtype="DOUBLE"))).all()
    assert abs(frames(sound(tone(channels=8), subtype="DOUBLE")) - TONE).max() < 1e-3
    decoded = decode_a_clip(sound(tone(3.0), subtype="DOUBLE"))
    assert (decoded.notes, decode_a_clip(sound(tone(2.0))).notes) == (("cut",), ())
    assert (decoded.media.frames == frames(sound(tone(3.0)[:32_000], subtype="DOUBLE"))).all()
    assert frame_samples(AUDIO) == (400, 160)
    assert [frames(sound(tone()[:length])).shape for length in (400, 560)] == [(1, 128), (2, 128)]


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000, 192_000, 15_999])
def test_any_rate_becomes_the_wanted_one(rate):
    decoded = decode_a_clip(sound(tone(1.0, rate), rate, subtype="DOUBLE"))
    assert "resampled" in decoded.notes
    assert len(decoded.media.frames) == 98
    spectra = decoded.media.frames, frames(sound(tone(1.0), subtype="DOUBLE"))
    strongest, expected = (np.bincount(spectrum.argmax(axis=1)).argmax() for spectrum in spectra)
    assert abs(strongest - expected) <= 1


def flac_of(samples, digit, count):
    """A FLAC file whose header gives another number of samples, of 36 bits."""
    data = bytearray(sound(samples, format="FLAC"))
    data[21:26] = bytes([data[21] & 0xF0 | digit]) + count
    return bytes(data)


def unknown_flac(samples):
    """A FLAC file whose header gives no length (0 samples), as of a writer that could not go back."""
    return flac_of(samples, 0, bytes(4))


NAN, INF = tone(), tone()
NAN[100], INF[7] = np.nan, -np.inf
WAV = sound(tone())
VORBIS, OPUS = (sound(tone(3.0), format="OGG", subtype=subtype) for subtype in ("VORBIS", "OPUS"))
BAD_CLIPS = {
    "no bytes": (b"", "empty"), "a text": (b"not a sound\n" * 30, "not_audio"),
    "no samples": (sound(np.zeros((0, 1))), "empty"), "one sample": (sound(tone()[:1]), "silent"),
    "two samples": (sound(tone()[:2]), "too_short"), "less than a frame": (sound(tone()[:399]), "too_short"),
    "less than a frame after resampling": (sound(tone(0.02, 48_000), 48_000), "too_short"),
    "zeros": (sound(np.zeros((8000, 1))), "silent"), "a constant": (sound(np.full((8000, 2), 0.25)), "silent"),
    "NaN": (sound(NAN, subtype="FLOAT"), "not_finite"), "Inf": (sound(INF, subtype="FLOAT"), "not_finite"),
    "1e300": (sound(tone() * 1e300, subtype="DOUBLE"), "not_finite"),
    "claimed hours": (mediafiles.claimed_wav(4 * 3600), "truncated"),
    "claimed hours of FLAC": (flac_of(tone(), 0xF, b"\xff" * 4), ("truncated", "undecodable")),
    "half of a WAV": (WAV[: len(WAV) // 2], "truncated"),
    "half of a FLAC": (sound(tone(), format="FLAC")[:4000], ("truncated", "undecodable")),
    "half of a FLAC of unknown length": (unknown_flac(tone())[:4000], ("truncated", "undecodable")),
    "half of a Vorbis": (VORBIS[: len(VORBIS) // 2], "truncated"),
    "half of an Opus": (OPUS[: len(OPUS) // 2], "truncated"),
    "a Vorbis without its last byte": (VORBIS[:-1], "truncated"),
    "a Vorbis without its last page": (VORBIS[: VORBIS.rfind(b"OggS")], "truncated"),
    "a Vorbis with a damaged last page": (VORBIS[:-100] + bytes([VORBIS[-100] ^ 255]) + VORBIS[-99:], "truncated"),
    "chained Vorbis": (VORBIS + VORBIS, "several_streams"),
    "chained Vorbis and Opus": (VORBIS + OPUS, "several_streams"),
    "chained after other bytes": (OPUS + b"x" * 100 + OPUS, "several_streams"),
    "a header alone": (WAV[:30], ("truncated", "undecodable", "not_audio")),
    "AIFF": (sound(tone(), format="AIFF"), "unsupported"),
    "a rate without a common divisor": (WAV[:24] + struct.pack("<I", 767_999) + WAV[28:], "unsupported"),
    "a rate of 2 GHz": (WAV[:24] + struct.pack("<I", 2**31 - 1) + WAV[28:], ("unsupported", "undecodable")),
    "65 channels": (sound(tone(0.05, channels=65)), "unsupported"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("decode", "data", "reasons"),
    [(decode_an_image, *bad) for bad in BAD.values()] + [(decode_a_clip, *bad) for bad in BAD_CLIPS.values()],
    ids=[*BAD, *BAD_CLIPS],
)
def test_bad_files_have_a_reason(decode, data, reasons):
    started = time.process_time()
    with pytest.raises((UndecodableError, UnsuitableError)) as caught:
        decode(data)
    assert caught.value.reason in (reasons if isinstance(reasons, tuple) else (reasons,))
    assert len(str(caught.value)) < 300
    assert time.process_time() - started < 5


def test_damage_gives_a_reason_and_never_another_error():
    bases = [LARGE, png(1), animated(), animated("WEBP"), upright_wrong(), stored(picture(1), "TIFF"), LARGE[:900]]
    assert {"kept", "not_an_image", "undecodable"} <= statuses_of_damaged(bases, decode_an_image, times=400, reach=300)
    bases = [sound(tone(), format=f, subtype=s) for f, s in (("WAV", None), ("FLAC", None), ("OGG", "VORBIS"))]
    assert {"kept", "not_audio", "undecodable"} <= statuses_of_damaged(bases, decode_a_clip, times=240, reach=200)


def test_bytes_around_pages_and_sizes_that_the_writer_did_not_know_are_no_damage():
    assert (frames(VORBIS + b"tag" * 50) == frames(VORBIS)).all()
    for unknown in (0xFFFFFFFF, 0x7FFFFFFF):
        streamed = WAV[:4] + struct.pack("<I", unknown) + WAV[8:40] + struct.pack("<I", unknown) + WAV[44:]
        assert (frames(streamed) == frames(WAV)).all()
    for seconds in (1.5, 3.0):  # content.max_seconds is 2
        expected, decoded = map(decode_a_clip, (sound(tone(seconds), format="FLAC"), unknown_flac(tone(seconds))))
        assert (decoded.media.frames == expected.media.frames).all()
        assert decoded.notes == expected.notes


SLOW = mediafiles.repeated_scans(3000, 3000)


def blobs(*files):
    return iter([Blob("", f"a/{number}", number, data, None) for number, data in enumerate(files)])


def statuses(records):
    return [record.reason if isinstance(record, ReadFailure | Rejected) else "kept" for record in records]


@pytest.mark.slow
def test_images_that_need_gigabytes_or_hours_are_failures():
    records = list(media_rows(blobs(png(1), mediafiles.blank_webp(9400, 9400), png(2)), CONTENT))
    assert statuses(records) == ["kept", "too_much_memory", "kept"]
    assert "1280 MiB" in records[1].message
    assert [record.offset for record in records] == [0, 1, 2]
    files = png(1), SLOW, png(2), mediafiles.commented_ppm(2 << 20), png(3)
    records = list(media_rows(blobs(*files), CONTENT, Limits(cpu_seconds=0.5)))
    assert statuses(records) == ["kept", "too_slow", "kept", "too_slow", "kept"]
    assert [record.id for record in records[::2]] == [record.id for record in media_rows(blobs(*files[::2]), CONTENT)]


def test_memory_is_bounded_by_the_tile_and_wide_values_and_transparency_take_no_copies():
    tiles = map(mediafiles.wide_tile, (64, 9000))
    small, large = statuses(media_rows(blobs(*tiles), CONTENT, Limits(memory_mib=64)))
    assert small == "kept"
    assert large in ("too_much_memory", "undecodable")  # libtiff reports an error of its own
    wide = stored(Image.fromarray(np.full((5000, 5000), 1 << 15, np.uint16)))
    clear = stored(Image.new("RGBA", (4000, 4000), (0, 0, 0, 128)))
    assert statuses(media_rows(blobs(wide, clear), CONTENT, Limits(memory_mib=240))) == ["kept", "kept"]


def test_a_reader_that_stops_early_leaves_no_answers_for_the_next_and_sounds_and_images_take_turns():
    reading = media_rows(blobs(*map(png, range(200))), CONTENT)
    assert next(reading).offset == 0
    reading.close()
    (row,) = media_rows(blobs(png(5)), CONTENT)
    assert row.id == decode_an_image(png(5)).id
    for _ in range(2):
        assert statuses(media_rows(blobs(sound(tone()), b"no sound", b""), AUDIO)) == ["kept", "not_audio", "empty"]
        assert statuses(media_rows(blobs(png(1), b"no image", b""), CONTENT)) == ["kept", "not_an_image", "empty"]


@pytest.mark.parametrize("alone", [False, True])
def test_a_reader_that_stops_early_ends_the_process_that_decodes_for_it(alone):
    limits = Limits(cpu_seconds=3)
    reading = media_rows(blobs(*map(png, range(64)), SLOW), CONTENT, limits)
    assert next(reading).offset == 0
    first = decoding._children[limits]._process

    def working():
        """The process, if only the slow file can have taken so much time."""
        child = decoding._children.get(limits)
        if child is None or child.batch is None or (child._process is first) == alone:
            return None
        times = psutil.Process(child._process.pid).cpu_times()
        return child._process if times.user + times.system > 1.5 else None

    process = until(working)
    reading.close()
    assert process.returncode == -signal.SIGKILL, "SIGPROF after all its time"
    assert statuses(media_rows(blobs(png(1)), CONTENT, limits)) == ["kept"]
    unsent = [SLOW]
    decoding.abandon(unsent)
    assert decoding.decode(CONTENT, unsent, limits) == []
