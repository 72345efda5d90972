"""Sounds of every kind as frames of log-mel energies; and what is said of bad ones."""

import struct
import time
import warnings

import numpy as np
import pytest
from mediafiles import claimed_wav, sound, statuses_of_damaged, tone

from declutr.pipeline.media.clips import decode_clip, frame_samples, log_mel
from declutr.pipeline.media.decoded import UndecodableError, UnsuitableError
from declutr.pipeline.shards.content import AudioContent

CONTENT = AudioContent(kind="audio", max_seconds=2.0)


def frames(data, content=CONTENT):
    return decode_clip(data, content, "").media.frames


def test_frames_are_those_of_ast():
    from transformers import ASTFeatureExtractor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one of its 128 filters is narrower than a frequency bin
        extractor = ASTFeatureExtractor(do_normalize=False, max_length=512)
    for number in range(4):
        samples = tone(0.3 + number, number=number)[:, 0].astype(np.float32)
        samples -= samples.mean()
        found = log_mel(samples.astype(np.float64), CONTENT)
        padded = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_values"][0]
        assert found.shape == (1 + (len(samples) - 400) // 160, 128)
        assert abs(found - padded[: len(found)]).max() < 1e-5
        assert (padded[len(found) :] == 0).all()


@pytest.mark.parametrize(
    ("format", "subtype", "within"),
    [("WAV", "FLOAT", 1e-3), ("WAV", "PCM_24", 0.05), ("FLAC", "PCM_24", 0.05), ("RF64", "PCM_32", 0.01)],
)
def test_formats_give_the_same_frames(format, subtype, within):
    expected = frames(sound(tone(), subtype="DOUBLE"))
    assert abs(frames(sound(tone(), format=format, subtype=subtype)) - expected).max() < within


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_ogg_has_the_frames_of_its_source(subtype):
    found = frames(sound(tone(), format="OGG", subtype=subtype))
    expected = frames(sound(tone(), subtype="DOUBLE"))
    assert abs(len(found) - len(expected)) <= 2
    loud = expected > expected.max() - 4
    assert np.median(abs(found[: len(expected)] - expected[: len(found)])[loud[: len(found)]]) < 0.5


def test_clip_of_several_channels_is_averaged():
    both = tone(channels=2)
    both[:, 1] = tone(number=3)[:, 0]
    expected = frames(sound(both.mean(axis=1), subtype="DOUBLE"))
    assert (frames(sound(both, subtype="DOUBLE")) == expected).all()
    eight = sound(tone(channels=8), subtype="DOUBLE")
    assert abs(frames(eight) - frames(sound(tone(), subtype="DOUBLE"))).max() < 1e-3


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000, 192_000, 15_999])
def test_any_rate_becomes_the_wanted_one(rate):
    decoded = decode_clip(sound(tone(1.0, rate), rate, subtype="DOUBLE"), CONTENT, "")
    assert "resampled" in decoded.notes
    assert len(decoded.media.frames) == 98
    expected = frames(sound(tone(1.0), subtype="DOUBLE"))
    strongest = [np.bincount(one.argmax(axis=1)).argmax() for one in (decoded.media.frames, expected)]
    assert abs(strongest[0] - strongest[1]) <= 1


def test_a_long_clip_is_cut_and_counted():
    decoded = decode_clip(sound(tone(3.0), subtype="DOUBLE"), CONTENT, "")
    assert decoded.notes == ("cut",)
    assert (decoded.media.frames == frames(sound(tone(3.0)[:32_000], subtype="DOUBLE"))).all()
    assert decode_clip(sound(tone(2.0)), CONTENT, "").notes == ()


def test_the_id_is_of_frames_not_of_the_file_or_the_label():
    whole = (tone() * 20_000).astype(np.int16)
    wav, flac = sound(whole, subtype="PCM_16"), sound(whole, format="FLAC", subtype="PCM_16")
    assert decode_clip(wav, CONTENT, "a").id == decode_clip(flac, CONTENT, "b").id
    assert decode_clip(sound(tone(number=1)), CONTENT, "a").id != decode_clip(wav, CONTENT, "a").id


def test_one_frame_is_enough():
    length, hop = frame_samples(CONTENT)
    assert (length, hop) == (400, 160)
    assert frames(sound(tone()[:length])).shape == (1, 128)
    assert frames(sound(tone()[: length + hop])).shape == (2, 128)


def lying_flac():
    """A FLAC file whose header claims 2**36 - 1 samples."""
    data = bytearray(sound(tone(), format="FLAC"))
    data[21] |= 0x0F
    data[22:26] = b"\xff\xff\xff\xff"
    return bytes(data)


def unknown_flac(samples):
    """A FLAC file whose header gives no length (0 samples), as of a writer that could not go back."""
    data = bytearray(sound(samples, format="FLAC"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    return bytes(data)


def damaged(data, position):
    """A file with one wrong byte."""
    return data[:position] + bytes([data[position] ^ 255]) + data[position + 1 :]


NAN, INF = tone(), tone()
NAN[100], INF[7] = np.nan, -np.inf
WAV = sound(tone())
VORBIS, OPUS = (sound(tone(3.0), format="OGG", subtype=subtype) for subtype in ("VORBIS", "OPUS"))
BAD = {
    "no bytes": (b"", "empty"),
    "a text": (b"not a sound\n" * 30, "not_audio"),
    "no samples": (sound(np.zeros((0, 1))), "empty"),
    "one sample": (sound(tone()[:1]), "silent"),
    "two samples": (sound(tone()[:2]), "too_short"),
    "less than a frame": (sound(tone()[:399]), "too_short"),
    "less than a frame after resampling": (sound(tone(0.02, 48_000), 48_000), "too_short"),
    "zeros": (sound(np.zeros((8000, 1))), "silent"),
    "a constant": (sound(np.full((8000, 2), 0.25)), "silent"),
    "NaN": (sound(NAN, subtype="FLOAT"), "not_finite"),
    "Inf": (sound(INF, subtype="FLOAT"), "not_finite"),
    "1e300": (sound(tone() * 1e300, subtype="DOUBLE"), "not_finite"),
    "claimed hours": (claimed_wav(4 * 3600), "truncated"),
    "claimed hours of FLAC": (lying_flac(), ("truncated", "undecodable")),
    "half of a WAV": (WAV[: len(WAV) // 2], "truncated"),
    "half of a FLAC": (sound(tone(), format="FLAC")[:4000], ("truncated", "undecodable")),
    "half of a FLAC of unknown length": (unknown_flac(tone())[:4000], ("truncated", "undecodable")),
    "half of a Vorbis": (VORBIS[: len(VORBIS) // 2], "truncated"),
    "half of an Opus": (OPUS[: len(OPUS) // 2], "truncated"),
    "a Vorbis without its last byte": (VORBIS[:-1], "truncated"),
    "a Vorbis without its last page": (VORBIS[: VORBIS.rfind(b"OggS")], "truncated"),
    "a Vorbis with a damaged last page": (damaged(VORBIS, len(VORBIS) - 100), "truncated"),
    "chained Vorbis": (VORBIS + VORBIS, "several_streams"),
    "chained Vorbis and Opus": (VORBIS + OPUS, "several_streams"),
    "chained after other bytes": (OPUS + b"x" * 100 + OPUS, "several_streams"),
    "a header alone": (WAV[:30], ("truncated", "undecodable", "not_audio")),
    "AIFF": (sound(tone(), format="AIFF"), "unsupported"),
    "a rate without a common divisor": (WAV[:24] + struct.pack("<I", 767_999) + WAV[28:], "unsupported"),
    "a rate of 2 GHz": (WAV[:24] + struct.pack("<I", 2**31 - 1) + WAV[28:], ("unsupported", "undecodable")),
    "65 channels": (sound(tone(0.05, channels=65)), "unsupported"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_clips_have_a_reason(name):
    data, reasons = BAD[name]
    started = time.process_time()
    with pytest.raises((UndecodableError, UnsuitableError)) as caught:
        decode_clip(data, CONTENT, "")
    assert caught.value.reason in (reasons if isinstance(reasons, tuple) else (reasons,))
    assert time.process_time() - started < 5


def test_ogg_with_bytes_around_its_pages_is_whole():
    assert (frames(VORBIS + b"tag" * 50) == frames(VORBIS)).all()


def test_flac_of_unknown_length_is_read_to_its_end():
    for seconds in (1.5, 3.0):  # content.max_seconds is 2
        expected = decode_clip(sound(tone(seconds), format="FLAC"), CONTENT, "")
        decoded = decode_clip(unknown_flac(tone(seconds)), CONTENT, "")
        assert (decoded.media.frames == expected.media.frames).all()
        assert decoded.notes == expected.notes


def test_a_size_that_the_writer_did_not_know_is_no_damage():
    for unknown in (0xFFFFFFFF, 0x7FFFFFFF):
        streamed = WAV[:4] + struct.pack("<I", unknown) + WAV[8:40] + struct.pack("<I", unknown) + WAV[44:]
        assert (frames(streamed) == frames(WAV)).all()


def test_damage_gives_a_reason_and_never_another_error():
    bases = [sound(tone(), format=f, subtype=s) for f, s in (("WAV", None), ("FLAC", None), ("OGG", "VORBIS"))]
    statuses = statuses_of_damaged(bases, lambda data: decode_clip(data, CONTENT, ""), times=240, reach=200)
    assert {"kept", "not_audio", "undecodable"} <= statuses
