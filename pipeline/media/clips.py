"""Decoding of sounds: mean of the channels, resampled, as frames of log-mel energies.

The energies are those of transformers' ASTFeatureExtractor before padding and normalisation.
"""

import math
import warnings
import zlib
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from declutr.pipeline.media.decoding import Decoded, UndecodableError, UnsuitableError, library_message
from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.shards.content import AudioContent
from declutr.pipeline.shards.media import Clip
from declutr.pipeline.shards.windows import EMPTY, TOO_SHORT

FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG")  # formats of libsndfile that are read
MAX_RATE = 768_000
MAX_CHANNELS = 64
MAX_TERM = 192_000  # largest term of the ratio of two sample rates, in lowest terms
NOT_FINITE = "not_finite"
_BLOCK_FRAMES = 1 << 16
_PREEMPHASIS = 0.97
LOWEST_ENERGY = 1.192092955078125e-07  # energy of silence in a frame
_LOWEST_HZ = 20
_RIFF = (b"RIFF", b"RIFX")
# Sizes from here on in a header mean that a program did not know the size when it began to write.
_UNKNOWN_BYTES = 0x7FFF_0000

# Length that libsndfile gives if a header has none, as in a FLAC file whose writer did not know it.
_UNKNOWN_FRAMES = 2**63 - 1
_CAPTURE = b"OggS"
_HEADER_BYTES = 27
_FIRST, _LAST = 2, 4  # flags of the first and the last page of a stream
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def decode_clip(data: bytes, content: AudioContent, label: str) -> Decoded:
    """A clip as the shards hold it. At most `content.max_seconds` are read, whatever length the header gives."""
    if not data:
        raise UnsuitableError(EMPTY, "the file has no bytes")
    mono, rate, was_cut = _read(data, content.max_seconds)
    if not np.isfinite(mono).all():
        raise UndecodableError(NOT_FINITE, "it has samples that are not finite")
    if len(mono) == 0:
        raise UnsuitableError(EMPTY, "it has no samples")
    if (mono == mono[0]).all():
        raise UnsuitableError("silent", f"all {len(mono)} samples are {mono[0]:g}")
    notes = ["cut"] if was_cut else []
    if rate != content.sample_rate:
        mono = _resampled(mono, rate, content.sample_rate)
        notes.append("resampled")
    frame_length, _ = frame_samples(content)
    if len(mono) < frame_length:
        raise UnsuitableError(TOO_SHORT, f"{len(mono)} samples, a frame has {frame_length}")
    frames = log_mel(mono - mono.mean(), content)
    if not np.isfinite(frames).all():
        raise UndecodableError(NOT_FINITE, "its samples are so large that energies are not finite")
    identity = document_id(f"{frames.shape[0]} x {frames.shape[1]}\n".encode() + frames.tobytes())
    return Decoded(Clip(frames, label), identity, tuple(notes))


def load_libraries(content: AudioContent) -> None:
    """Loads what `decode_clip` needs for this content, which takes a second."""
    import scipy.signal  # noqa: F401
    import soundfile  # noqa: F401
    import transformers.audio_utils  # noqa: F401

    _filters(content.sample_rate, content.num_mel_bins, frame_samples(content)[0])


def frame_samples(content: AudioContent) -> tuple[int, int]:
    """Samples of a frame, and between the starts of two frames."""
    return max(2, int(content.sample_rate * content.frame_ms / 1000)), max(
        1, int(content.sample_rate * content.hop_length_ms / 1000)
    )


def log_mel(samples: NDArray[np.float64], content: AudioContent) -> NDArray[np.float32]:
    """Log-mel energies `(num_frames, num_mel_bins)` of samples at `content.sample_rate`, at least one frame of them."""
    # Imported here because it takes a second, and tasks for texts do not need it.
    from transformers.audio_utils import spectrogram

    frame_length, hop_length = frame_samples(content)
    window, filters, fft_length = _filters(content.sample_rate, content.num_mel_bins, frame_length)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks that energies are finite
        powers = spectrogram(
            samples.astype(np.float32),
            window,
            frame_length=frame_length,
            hop_length=hop_length,
            fft_length=fft_length,
            power=2.0,
            center=False,
            preemphasis=_PREEMPHASIS,
            remove_dc_offset=True,
        )
        # Not by `spectrogram`: a dense product waits for BLAS threads, and its sums depend on the kind of processor.
        energies = filters @ np.ascontiguousarray(powers)
    return np.ascontiguousarray(np.log(np.maximum(energies, LOWEST_ENERGY)).T, np.float32)


def _read(data: bytes, max_seconds: float) -> tuple[NDArray[np.float64], int, bool]:
    """The mean of the channels `(num_samples,)`, the sample rate, and True if the clip was cut."""
    import soundfile  # imported here because only audio needs it

    class ForwardSound(soundfile.SoundFile):  # type: ignore[misc]
        """A `SoundFile` for reading forward: a FLAC file of unknown length (0 samples in its header) cannot seek."""

        def seekable(self) -> bool:
            """Returns False, so that `read` does not seek to where it is after each block."""
            return False

    try:
        with ForwardSound(BytesIO(data)) as file:
            _check(file)
            if file.format == "OGG":
                check_ogg(data)
            limit = max(1, round(max_seconds * file.samplerate))
            parts, count = [], 0
            # One sample more shows whether the clip is longer. Blocks, because the claimed length is not trusted.
            while count <= limit and len(block := file.read(min(_BLOCK_FRAMES, limit + 1 - count), "float64", True)):
                parts.append(block.mean(axis=1))
                count += len(block)
            rate, claimed = int(file.samplerate), int(file.frames)
    except UndecodableError:
        raise
    except (soundfile.SoundFileError, RuntimeError, OSError, ValueError, TypeError) as error:
        message = library_message(error)
        not_audio = "not recognised" in message or "unknown format" in message.lower()
        raise UndecodableError("not_audio" if not_audio else "undecodable", f"{message} (libsndfile)") from error
    if count < min(0 if claimed == _UNKNOWN_FRAMES else claimed, limit) or _is_cut_off(data):
        raise UndecodableError("truncated", f"{count} samples, its header gives {claimed} or more")
    mono = np.concatenate(parts) if parts else np.zeros(0)
    return mono[:limit], rate, count > limit


def _check(file: Any) -> None:
    """Raises UndecodableError for another format, or an impossible rate or number of channels."""
    if file.format not in FORMATS:
        raise UndecodableError("unsupported", f"the format {file.format}; read are WAV, FLAC and Ogg")
    if not 1 <= file.samplerate <= MAX_RATE or not 1 <= file.channels <= MAX_CHANNELS:
        raise UndecodableError(
            "unsupported",
            f"{file.channels} channels at {file.samplerate} Hz; read are up to {MAX_CHANNELS} at up to {MAX_RATE} Hz",
        )


def _is_cut_off(data: bytes) -> bool:
    """Returns True if the header of a WAV file gives more bytes than there are."""
    if data[:4] not in _RIFF:
        return False
    size = int.from_bytes(data[4:8], "little" if data[:4] == b"RIFF" else "big")
    return size < _UNKNOWN_BYTES and size + 8 > len(data) + 1  # some programs leave out the last padding byte


def _resampled(samples: NDArray[np.float64], rate: int, sample_rate: int) -> NDArray[np.float64]:
    """The samples at another rate, by a polyphase low-pass filter."""
    from scipy.signal import resample_poly  # imported here because it takes a second

    common = math.gcd(rate, sample_rate)
    if max(rate, sample_rate) // common > MAX_TERM:  # the filter has 20 times as many taps
        raise UndecodableError("unsupported", f"{rate} Hz has no simple ratio to content.sample_rate = {sample_rate}")
    return resample_poly(samples, sample_rate // common, rate // common)


@lru_cache(maxsize=4)
def _filters(sample_rate: int, num_mel_bins: int, frame_length: int) -> tuple[NDArray[np.float64], Any, int]:
    """The window, the sparse mel filters `(num_mel_bins, bins)` and the length of the Fourier transform."""
    from scipy.sparse import csr_array
    from transformers.audio_utils import mel_filter_bank, window_function

    fft_length = 1 << (frame_length - 1).bit_length()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on filters narrower than a frequency bin, which stay at the floor
        filters = mel_filter_bank(
            num_frequency_bins=fft_length // 2 + 1,
            num_mel_filters=num_mel_bins,
            min_frequency=_LOWEST_HZ,
            max_frequency=sample_rate // 2,
            sampling_rate=sample_rate,
            norm=None,
            mel_scale="kaldi",
            triangularize_in_mel_space=True,
        )
    return window_function(frame_length, "hann", periodic=False), csr_array(filters.T), fft_length


def check_ogg(data: bytes) -> None:
    """Checks in linear time that a file is one stream with all its pages; bytes outside of pages are skipped."""
    streams, flags, at = 0, 0, data.find(_CAPTURE)
    while at >= 0:
        flags, end = _page(data, at)
        streams += bool(flags & _FIRST)
        at = data.find(_CAPTURE, end)
    if streams > 1:
        raise UndecodableError(
            "several_streams", f"the Ogg file has {streams} streams, of which one would be read; store each in a file"
        )
    if not flags & _LAST:
        raise UndecodableError("truncated", "the Ogg file has no last page")


def _page(data: bytes, at: int) -> tuple[int, int]:
    """The flags of the page at this position, and the position after it."""
    num_lengths = data[at + _HEADER_BYTES - 1] if at + _HEADER_BYTES <= len(data) else 0
    body = at + _HEADER_BYTES + num_lengths
    end = body + sum(data[at + _HEADER_BYTES : body])
    if end > len(data):
        raise UndecodableError("truncated", f"the Ogg file ends within its page at byte {at}")
    checksum = data[at + 22 : at + 26]
    if _checksum(data[at : at + 22] + bytes(4) + data[at + 26 : end]) != int.from_bytes(checksum, "little"):
        raise UndecodableError("truncated", f"the Ogg page at byte {at} is damaged (its checksum is wrong)")
    return data[at + 5], end


def _checksum(page: bytes) -> int:
    """The checksum of a page: zlib's polynomial with the bits of bytes and result in the other order, started at 0."""
    crc = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{crc:032b}"[::-1], 2)
