"""WET and WARC: records of web pages. Texts (`conversion`, as in Common Crawl's WET) are documents, pages failures."""

from declutr.pipeline.readers.corpus import Records, failed, unreadable
from declutr.pipeline.readers.lines import MAX_HELD_BYTES, documents
from declutr.pipeline.readers.streams import READ_ERRORS, Body

_MAX_HEADER_BYTES = 1 << 16
_ENDS = (b"\r\n\r\n", b"\n\n")


def read_wet(body: Body) -> Records:
    """The text of every record of the type `conversion`; a page is a failure, and what describes others is left out.

    The offset is that of the record. A damaged header loses the rest of the file.
    """
    stream, source = body.stream, body.source
    offset = stream.position
    try:
        while head := stream.peek(_MAX_HEADER_BYTES):
            offset = stream.position
            mark = next((mark for mark in _ENDS if mark in head), None)
            if not head.startswith(b"WARC/") or mark is None:
                raise OSError("no header of a WARC record where one must be")
            header, _, _ = head.partition(mark)
            stream.skip(len(header) + len(mark))
            lines = [line.partition(b":") for line in header.splitlines()[1:]]
            fields = {name.strip().lower(): value.strip() for name, _, value in lines}
            length, kind = fields.get(b"content-length", b""), fields.get(b"warc-type", b"").decode("latin-1")
            if not length.isdigit() or len(length) > 18:
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
