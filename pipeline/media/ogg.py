"""Check of an Ogg file's pages (RFC 3533): libsndfile reads the first stream alone, as far as its pages go."""

import zlib

from declutr.pipeline.media.decoded import UndecodableError

SEVERAL_STREAMS = "several_streams"
_CAPTURE = b"OggS"
_HEADER_BYTES = 27
_FIRST, _LAST = 2, 4
"""Flags of the first and the last page of a stream."""
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def check_ogg(data: bytes) -> None:
    """Checks that a file is one stream with all its pages; bytes before, between and after pages are skipped.

    The time is linear in the size of the file.

    Raises:
        UndecodableError: `truncated` without the last page or with a damaged one; `several_streams` with a further
            stream, chained or interleaved.
    """
    streams, flags, at = 0, 0, data.find(_CAPTURE)
    while at >= 0:
        flags, end = _page(data, at)
        streams += bool(flags & _FIRST)
        at = data.find(_CAPTURE, end)
    if streams > 1:
        raise UndecodableError(
            SEVERAL_STREAMS, f"the Ogg file has {streams} streams, of which one would be read; store each in a file"
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
    found = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{found:032b}"[::-1], 2)
