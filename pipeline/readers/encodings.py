"""Conversion of UTF-16 and UTF-32 with a byte order mark to UTF-8, which all text readers expect."""

import codecs

from declutr.pipeline.readers.streams import ByteStream

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # starts like UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LARGEST_GROWTH = 2
"""Largest growth: two bytes of UTF-16 become at most three of UTF-8."""
_LEAST_BYTES = 4


def encoding_of(head: bytes) -> str | None:
    """The encoding of the byte order mark at the start of a file, unless it is UTF-8."""
    return next((encoding for mark, encoding in _MARKS if head.startswith(mark)), None)


def as_utf8(stream: ByteStream, encoding: str) -> ByteStream:
    """The stream in UTF-8, without its byte order mark. Positions count from 0 in what it gives.

    A lone surrogate becomes bytes that are not UTF-8, so that it affects only its document. If the bytes are not
    characters, or end within one, the stream breaks off with an OSError.
    """
    stream.skip(len(next(mark for mark, name in _MARKS if name == encoding)))
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")

    def read(num_bytes: int) -> bytes:
        while True:
            raw = stream.read(max(_LEAST_BYTES, num_bytes // _LARGEST_GROWTH))
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise OSError(f"no {encoding.upper()}, as the byte order mark says: {error.reason}") from error
            if text or not raw:
                return text.encode("utf-8", "surrogatepass")

    return ByteStream(read, 0)
