"""Images and sounds, good and bad, as the bytes of files."""

import io
import random
import struct
import zlib

import numpy as np
import soundfile
from PIL import Image

from declutr.pipeline.media.decoding import UndecodableError, UnsuitableError

RED = (200, 30, 40)


def picture(number=0, size=(40, 30)):
    width, height = size
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))


def stored(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png(number=0, size=(40, 30)):
    return stored(picture(number, size))


def upright_wrong(number=0):
    """A JPEG that is stored on its side, with the EXIF orientation that says so."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return stored(picture(number), "JPEG", exif=exif, quality=95)


def animated(format="GIF"):
    frames = [picture(n).quantize(32) if format == "GIF" else picture(n) for n in range(3)]
    return stored(frames[0], format, save_all=True, append_images=frames[1:])


def claimed_png(width, height):
    data = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", data), (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    sizes = [(struct.pack(">I", len(d)), kind + d, struct.pack(">I", zlib.crc32(kind + d))) for kind, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(b"".join, sizes))


def tone(seconds=0.5, rate=16_000, number=0, channels=1):
    at = np.arange(int(seconds * rate)) / rate
    sound = 0.3 * np.sin(2 * np.pi * (220 + 40 * number) * at) + 0.1 * np.sin(2 * np.pi * 1234 * at)
    return (sound + np.random.default_rng(number).normal(0, 0.01, len(at)))[:, None] * np.ones((1, channels))


def sound(samples, rate=16_000, format="WAV", subtype=None):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


def claimed_wav(seconds, rate=16_000):
    data, size = sound(tone(0.5, rate), rate), seconds * rate * 2
    return data[:4] + struct.pack("<I", size + 36) + data[8:40] + struct.pack("<I", size) + data[44:]


def spread(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def blank_webp(width, height):
    """A lossless WebP of one colour in 30 bytes, of any size up to 16,384: its pixels take no bits."""
    bits = [(0x2F, 8), (width - 1, 14), (height - 1, 14), (0, 1), (0, 3)]  # signature, size, alpha, version
    bits += [(0, 3), *[(1, 4)] * 5]  # no transform, cache, meta prefix code; five prefix codes of the one symbol 0
    number = place = 0
    for value, length in bits:
        number |= value << place
        place += length
    data = number.to_bytes(-(-place // 8) + 1, "little")
    chunk = b"VP8L" + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(chunk) + 4) + b"WEBP" + chunk


def repeated_scans(size, number):
    """A progressive JPEG of which one scan is stored many times; each costs a pass over all coefficients."""
    data = stored(Image.new("L", (size, size)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * number + data[-2:]


def commented_ppm(num_bytes):
    return b"P3 8 8 255\n" + b"#\n" * (num_bytes // 2) + b"1 " * 192


def wide_tile(side):
    """A TIFF of 16 x 16 pixels in one deflated tile of `side` x `side`, of which few bytes are stored."""
    deflater = zlib.compressobj(9)
    data = b"".join(deflater.compress(bytes(side)) for _ in range(side)) + deflater.flush()
    tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    tags += [(324, 8 + 2 + 12 * 10 + 4), (325, len(data))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4) + data


def statuses_of_damaged(bases, decode, times, reach):
    """Reasons of failures, or "kept", of files of which up to eight of the first `reach` bytes were changed."""
    generator, statuses = random.Random(5), set()
    for number in range(times):
        data = bytearray(bases[number % len(bases)])
        for _ in range(generator.choice((1, 2, 8))):
            data[generator.randrange(min(len(data), reach))] = generator.randrange(256)
        try:
            decode(bytes(data))
            statuses.add("kept")
        except (UndecodableError, UnsuitableError) as error:
            statuses.add(error.reason)
    return statuses
