"""Texts in UTF-16 and UTF-32, which a byte order mark tells: streams of UTF-8, as all readers of text expect them."""

import codecs

from pipeline.readers.streams import ByteStream

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins like UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LARGEST_GROWTH = 2
"""Two bytes of UTF-16 are at most three of UTF-8."""
_LEAST_BYTES = 4


def encoding_of(head: bytes) -> str | None:
    """The encoding that the byte order mark at the beginning of a file tells, unless it is UTF-8."""
    return next((encoding for mark, encoding in _MARKS if head.startswith(mark)), None)


def as_utf8(stream: ByteStream, encoding: str) -> ByteStream:
    """The stream in UTF-8, without its byte order mark. Positions count from 0 in what it gives.

    A lone surrogate becomes bytes that are no UTF-8, so that it spoils its own document and no other. Where the bytes
    are no characters at all, or end within one, the stream breaks off with an OSError.
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
