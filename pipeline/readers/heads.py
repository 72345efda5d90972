"""The head of a file: what its first bytes and its name say about its format."""

import codecs
import json
import re
from functools import cached_property
from typing import Any

from declutr.pipeline.readers.blobs import LABEL_SUFFIX, document_kind
from declutr.pipeline.readers.corpus import JSON_SUFFIX, SUFFIXES, Format, Rules, bare_suffix
from declutr.pipeline.readers.lines import encoding_of
from declutr.pipeline.readers.streams import BLOCK_BYTES, ByteStream
from declutr.pipeline.readers.tables import ARROW_FILE

JSON_HEAD_BYTES = BLOCK_BYTES << 12  # 2 MiB; a longer first object is data, as no description is
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")
_PARQUET = b"PAR1"


class Head:
    """The first bytes of a file.

    Attributes:
        data: the bytes as they are; `format` is for those that are neither compressed nor an archive.
        name: name of the file.
        suffix: its ending without that of a compression.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name, self.suffix = data, name, bare_suffix(name)

    @classmethod
    def of(cls, stream: ByteStream, name: str) -> "Head":
        """As many bytes as the format needs: of a .json and without an ending, the first object."""
        num_bytes = BLOCK_BYTES
        head = cls(stream.head(num_bytes), name)
        while (
            head.suffix in ("", JSON_SUFFIX)
            and len(head.data) == num_bytes < JSON_HEAD_BYTES
            and head._object == ({}, True)
        ):
            num_bytes *= 8
            head = cls(stream.head(num_bytes), name)
        return head

    def format(self, rules: Rules, *, inside: bool) -> Format | None:
        """The format of content that is not an archive; `inside` one, a .txt is a text."""
        is_parquet = self.data.startswith(_PARQUET)
        if rules.blobs:
            if is_parquet or self.suffix in rules.blobs.suffixes:
                return "parquet" if is_parquet else "blob"
            return None if not inside else "label" if self.suffix == LABEL_SUFFIX else "other"
        if rules.format:
            return rules.format
        if is_parquet:
            return "parquet"
        if self.data.startswith(ARROW_FILE):
            return "arrow"
        if rules.documents and document_kind(self.data, self.name):
            return "document"
        if self.suffix == JSON_SUFFIX or (not self.suffix and self.has_key(rules)):
            return "json" if self._is_one_value else "jsonl"
        if not self.suffix:
            return "wet" if self.data.startswith(b"WARC/") else "text_file" if self.is_prose() else None
        by_suffix = SUFFIXES.get(self.suffix)
        return ("text_file" if inside else rules.plain) if by_suffix == "text" else by_suffix

    def has_key(self, rules: Rules) -> bool:
        """Returns True if the first object has a key that is read, or is cut after it, or is longer than a head."""
        names = rules.keys.values() if rules.keys else rules.text_names
        value, is_cut = self._object
        return any(name in value for name in names) or (is_cut and len(self.data) >= JSON_HEAD_BYTES)

    def is_object(self) -> bool:
        """Returns True if the first line may be an object."""
        return not self._is_one_value and self._text.startswith("{")

    def is_prose(self) -> bool:
        """Returns True if a file begins like text: UTF-8 without control characters, no markup and no program."""
        if encoding_of(self.data):  # a mark says that it is text, whose bytes look like none
            return True
        try:
            # Incremental, because the head may end within a character.
            text = codecs.getincrementaldecoder("utf-8")().decode(self.data)
        except UnicodeDecodeError:
            return False
        return bool(text.strip()) and not _CONTROL.search(text) and not self._text.startswith(("<", "#!", "{", "["))

    @cached_property
    def _text(self) -> str:
        return self.data.decode(encoding_of(self.data) or "utf-8", "replace").lstrip("\ufeff \t\r\n")

    @cached_property
    def _is_one_value(self) -> bool:
        """True for JSON that is an array, or an object over several lines."""
        return self._text.startswith("[") or self._text.partition("\n")[0].strip() == "{"

    @cached_property
    def _object(self) -> tuple[dict[str, Any], bool]:
        """The first object of JSON, also of an array; none, and True if it is cut, so that more bytes may show it."""
        text = self._text.removeprefix("[").lstrip()
        if not text.startswith("{"):
            return {}, False
        try:
            value, _ = json.JSONDecoder().raw_decode(text if self._is_one_value else text.partition("\n")[0])
        except RecursionError:
            return {}, False
        except ValueError:
            return {}, self._is_one_value or "\n" not in text
        return value, False
