"""Archives as streams: members of tar and records of WET and WARC, one after the other; nothing is written to disk.

A WARC record of type `conversion` (a page's text, as in Common Crawl's WET) is a document; a page is a failure.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from declutr.pipeline.readers.corpus import Records, failed, unreadable
from declutr.pipeline.readers.lines import MAX_HELD_BYTES, documents
from declutr.pipeline.readers.streams import BLOCK_BYTES, READ_ERRORS, Body, ByteStream

_MAX_HEADER_BYTES = 1 << 20  # largest name or extended header; only a broken or malicious archive has a longer one
_MAX_NUMBER = 1 << 60  # largest number in a header, an exbibyte; a larger one means damage
_MAX_DIGITS = 19  # digits of _MAX_NUMBER; `int` refuses more than 4,300
# Prefix of extended-header keys for sparse files, whose contents start with a map of holes instead of text.
_SPARSE = b"GNU.sparse."
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a FIFO"}
_KINDS |= {b"0": "file", b"\0": "file", b"7": "file", b"5": "folder"}
_EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")  # kinds without contents, whatever their size says
_EXTENSIONS = (b"L", b"K", b"x", b"g", b"X")  # kinds of extension headers: they describe the next member or all
_MAX_WARC_HEADER_BYTES = 1 << 16
_ENDS = (b"\r\n\r\n", b"\n\n")


@dataclass(slots=True)
class Member:
    """One entry of an archive."""

    name: str
    kind: str  # `file`, `folder`, or a description of anything else
    start: int  # position of its first header in the archive
    data: ByteStream  # the contents; read them before the next member is requested


def _contents(stream: ByteStream, size: int) -> ByteStream:
    """The next `size` bytes of an archive, and nothing beyond them. Raises EOFError if the archive ends first."""
    left = size

    def read(num_bytes: int) -> bytes:
        nonlocal left
        data = stream.read(min(num_bytes, left)) if left else b""
        if left and not data:
            raise EOFError(f"the archive ends {left} bytes before the end of this member")
        left -= len(data)
        return data

    return ByteStream(read)


def is_tar(head: bytes) -> bool:
    """Returns True if the first header of a file has the magic of an archive."""
    return head[257:262] == b"ustar"  # GNU's magic has another sixth byte


def members(
    stream: ByteStream,  # the archive
    stop: int,  # a position in it
    ends: list[int] | None = None,  # list that receives the position after each end mark
) -> Iterator[Member]:
    """Members whose header starts before `stop`, of a stream at a header; concatenated archives are read as one."""
    extended, start = _ExtendedFields(), stream.position
    while start < stop:
        header = stream.read_whole(BLOCK_BYTES)
        if len(header) < BLOCK_BYTES:
            raise EOFError("the archive ends without its end mark")
        # A block of zeros is an end mark, but concatenated archives continue after it.
        if header.count(0) == BLOCK_BYTES:
            if ends is not None:
                ends.append(stream.position)
            if not _skip_zeros(stream, start):
                return
            start = stream.position
            continue
        # The sum counts its own field as spaces.
        if _number(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            raise OSError("a damaged header (its checksum is wrong)")
        kind, length = header[156:157], _number(header[124:136])
        if kind in _EXTENSIONS:
            extended.add(kind, _payload(stream, length))
            continue
        # The map of holes of a sparse file continues in blocks after its header; a byte in each is set if one follows.
        follows = kind == b"S" and header[482]
        while follows:
            follows = (stream.read_whole(BLOCK_BYTES) + bytes(BLOCK_BYTES))[504]
        # A link can have its target's size, without the bytes. pax has sizes above 8 GiB, which the octal field cannot.
        if kind in _EMPTY:
            length = 0
        elif extended.size is not None:
            length = extended.size
        end = stream.position + _padded(length)
        yield Member(*_title(header, extended), start, _contents(stream, length))
        stream.skip(end - stream.position)  # bytes that the reader of the member has not read
        extended, start = _ExtendedFields(), stream.position


@dataclass
class _ExtendedFields:
    """Fields of a member that its extension headers give; None: its own header gives them."""

    name: str | None = None
    size: int | None = None
    sparse: bool = False

    def add(self, kind: bytes, payload: bytes) -> None:
        """Reads the payload of an extension header: GNU's long name (L) or pax (x, X). Others have no such fields."""
        if kind == b"L":
            self.name = _text(payload)
        elif kind in (b"x", b"X"):
            self.name, self.size = _extended(payload, self.name, self.size)
            self.sparse = self.sparse or _SPARSE in payload


def _title(header: bytes, extended: _ExtendedFields) -> tuple[str, str]:
    """Name and kind of a member."""
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""  # GNU's headers have times there
    own = f"{prefix}/{_text(header[:100])}" if prefix else _text(header[:100])
    name, kind = own if extended.name is None else extended.name, header[156:157]
    if extended.sparse or kind == b"S":
        return name, "a sparse file"
    if kind in (b"0", b"\0") and name.endswith("/"):  # old archives have no kind for folders
        return name, "folder"
    return name, _KINDS.get(kind, f"of the unknown type {kind!r}")


def find_members(stream: ByteStream, key: Callable[[str], str] | None = None) -> tuple["array[int]", int | None]:
    """Positions of all headers and of the end, None if broken; with `key`, only the first of a run with one key."""
    starts, ends = array("q"), [0]  # 8 bytes a member; a list needs 40
    before: str | None = None
    try:
        for member in members(stream, 1 << 62, ends):
            now = key(member.name) if key else None
            if now is None or now != before:
                starts.append(member.start)
            before = now  # a label and its images are next to each other
    except READ_ERRORS:
        return starts, None
    return starts, ends[-1]


def _skip_zeros(stream: ByteStream, start: int) -> bool:
    """Moves the stream to the next block (counted from `start`) that is not all zeros; False if there is none."""
    while data := stream.read():
        zeros = len(data) - len(data.lstrip(b"\0"))
        if zeros < len(data):
            position = stream.position - len(data) + zeros
            stream.unread(data[max(0, zeros - (position - start) % BLOCK_BYTES) :])
            return True
    return False


def _number(field: bytes) -> int:
    """An octal number, or a binary one if the first bit is set, as GNU tar writes sizes above 8 GiB."""
    if field[0] == 0x80:  # GNU's base-256
        number = int.from_bytes(field[1:], "big")
        if number > _MAX_NUMBER:
            raise OSError(f"a damaged header (a number in it is above {_MAX_NUMBER})")
        return number
    digits = field.split(b"\0", 1)[0].strip()
    if digits.strip(b"01234567"):
        raise OSError("a damaged header (a number in it is none)")
    return int(digits or b"0", 8)


def _payload(stream: ByteStream, length: int) -> bytes:
    """Reads the content of an extension header."""
    if length > _MAX_HEADER_BYTES:
        raise OSError(f"a damaged header (an extension of {length} bytes)")
    data = stream.read_whole(_padded(length))
    if len(data) < length:
        raise EOFError("the archive ends in a header")
    return data[:length]


def _extended(payload: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Name and size from the records `LENGTH KEY=VALUE` of a pax header."""
    position = 0
    while position < len(payload):
        digits, space, _ = payload[position : position + 20].partition(b" ")  # 19 digits and the space
        # A record of 0 bytes would be read for ever.
        if not space or not digits.isdigit() or int(digits) <= len(digits) + 1:
            raise OSError("a damaged extended header")
        key, equals, value = payload[position + len(digits) + 1 : position + int(digits)].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise OSError("a damaged extended header")
        if key == b"path":
            name = _text(value[:-1])
        elif key == b"size":
            if not value[:-1].isdigit():
                raise OSError("a damaged extended header (the size in it is none)")
            if len(value) - 1 > _MAX_DIGITS or int(value) > _MAX_NUMBER:
                raise OSError(f"a damaged extended header (the size in it is above {_MAX_NUMBER})")
            size = int(value)
        position += int(digits)
    return name, size


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _padded(size: int) -> int:
    """Size rounded up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def read_wet(body: Body) -> Records:
    """The text of every record of type `conversion`. Pages are failures; records about other records are skipped.

    The offset is that of the record. A damaged header loses the rest of the file.
    """
    stream, source = body.stream, body.source
    offset = stream.position
    try:
        while head := stream.peek(_MAX_WARC_HEADER_BYTES):
            offset = stream.position
            mark = min((mark for mark in _ENDS if mark in head), key=head.index, default=None)
            if not head.startswith(b"WARC/") or mark is None:
                raise OSError("no header of a WARC record where one must be")
            header, _, _ = head.partition(mark)
            stream.skip(len(header) + len(mark))
            lines = [line.partition(b":") for line in header.splitlines()[1:]]
            fields = {name.strip().lower(): value.strip() for name, _, value in lines}
            length, kind = fields.get(b"content-length", b""), fields.get(b"warc-type", b"").decode("latin-1")
            if not length.isdigit() or len(length) > 18:  # 19 may not fit int64
                raise OSError("a WARC record without its length")
            if kind == "conversion" and int(length) <= MAX_HELD_BYTES:
                text = stream.read_whole(int(length))
                if len(text) < int(length):
                    raise EOFError(f"the file ends {int(length) - len(text)} bytes before the end of a record")
                yield from documents(text, source, offset, body.rules.max_bytes)
            else:
                stream.skip(int(length))
                if kind == "conversion":
                    yield failed("too_large", source, offset, f"a text of more than {MAX_HELD_BYTES >> 20} MiB")
                elif kind in ("response", "resource"):
                    message = f"a WARC record of type {kind} is a page as it was sent; WET files hold texts"
                    yield failed("unknown_format", source, offset, message)
            while stream.peek(1) in (b"\r", b"\n"):
                stream.skip(1)
    except READ_ERRORS as error:
        yield unreadable(error, source, offset)
