"""Settings of a corpus, names of its files, the parts it is cut into, and the records that reading it gives."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from declutr.common.config import Strict
from declutr.common.console.terminal import shorten
from declutr.common.errors import suggest

MIB = 2**20
UNIT_MIB = 32.0  # text of a unit of preparation in MiB, unless the corpus is larger than any today
ID_BYTES = 16  # length of a document id
END = 2**62  # `stop` of a part that extends to the end of its file

MAX_DOCUMENT_MIB = Field(default=16.0, gt=0, le=512)

Choice = Literal[
    "auto", "auto_text_file", "jsonl", "json", "text", "text_file", "parquet", "arrow", "csv", "tsv", "wet"
]  # settings of `corpus.format`; the last ones are formats of all files
Format = Literal[
    "jsonl", "json", "text", "text_file", "parquet", "arrow", "csv", "tsv", "wet", "document", "blob", "label", "other"
]
"""json: a value of several lines. wet: texts of web pages, as Common Crawl publishes them. document: html, docx, pdf.
blob: an image or clip. label: a label of one. other: a file of such a corpus that is neither."""
NO_TEXT = "no_text_field"
_SHOWN_CHARACTERS = 200
_MIN_DOCUMENT_BYTES = 64
FIELD_FORMATS = ("jsonl", "json", "csv", "tsv", "parquet")  # formats of files whose rows have several values

Names = tuple[str, ...]  # keys or columns that hold a text, in the order in which their values are joined
Keys = Mapping[str, str]  # key or column of each value, by the setting that names it

SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text_file",
    ".markdown": "text_file",
    ".rst": "text_file",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
    ".wet": "wet",
}
# Suffixes of files whose texts the extra `documents` extracts, with the kind of each.
DOCUMENT_SUFFIXES = {".html": "html", ".htm": "html", ".xhtml": "html", ".docx": "docx", ".pdf": "pdf"}
MARKDOWN = {".md", ".markdown", ".rst"}
# A .json file is read if it is named explicitly, or if its first object has the key of the text; in a searched folder
# it is more often a description.
JSON_SUFFIX = ".json"
TAR_SUFFIX = ".tar"
COMPRESSED_SUFFIXES = {
    **dict.fromkeys((".gz", ".bgz", ".xz", ".zst", ".zstd", ".bz2"), ""),
    **dict.fromkeys((".tgz", ".txz", ".tbz", ".tbz2", ".tzst"), ".tar"),
}  # Suffixes of compressed files, each with the further suffix that it implies


def bare_suffix(name: str) -> str:
    """The suffix of the format: `.jsonl` of `a.jsonl.gz`, `.tar` of `a.tgz`."""
    base = name.rpartition("/")[2].lower()
    member = base.rpartition("!")[2]  # the name within an archive, after its last !
    stem, suffix = _split(base if member.startswith(".") else member)
    return suffix if suffix not in COMPRESSED_SUFFIXES else COMPRESSED_SUFFIXES[suffix] or _split(stem)[1]


def _split(name: str) -> tuple[str, str]:
    """Splits a file name at its last dot; pathlib would take half the time of reading a small member."""
    stem, _, ending = name.rpartition(".")
    return (stem, f".{ending}") if stem else (name, "")


def is_hidden(relative: str) -> bool:
    """Returns True if a part of a relative path starts with a dot."""
    return any(name.startswith(".") and name not in (".", "..") for name in relative.split("/"))


@dataclass(frozen=True, slots=True)
class Document:
    """One document as read: raw text and its place (`offset` as in pipeline/shards/writer.py)."""

    text: str
    source: str
    offset: int
    cut: bool = field(default=False, kw_only=True)  # it was too long, and goes on in the next document


@dataclass(frozen=True, slots=True)
class Rejected(Document):
    """A record that forms no row, although it could be read."""

    reason: str


@dataclass(frozen=True, slots=True)
class Blob(Document):
    """An image, a clip or an html, docx or pdf file as it is stored; `text` is empty."""

    data: bytes
    label: str | None  # label stored with it; None if there is none


Value = str | int | None


@dataclass(frozen=True, slots=True)
class Fields(Document):
    """Named values of one line or row, in the order of `Rules.keys`; none for a blank line. `text` is empty."""

    values: tuple[Value, ...]


class ReadFailure(Strict):
    """One document, or the rest of one file, that could not be read."""

    reason: str
    source: str
    offset: int
    message: str
    rest: bool = False  # True if the rest of the source is lost with it

    def __str__(self) -> str:
        return f"{self.source}:{self.offset} {self.reason}: {self.message}"


Record = Document | ReadFailure
Records = Iterator[Record]


def failed(reason: str, source: str, offset: int, message: str) -> ReadFailure:
    """A failure of the record at this place."""
    return ReadFailure(reason=reason, source=source, offset=offset, message=message)


def unreadable(error: Exception, source: str, offset: int) -> ReadFailure:
    """The failure for the rest of a source after this offset."""
    message = f"{error or type(error).__name__} (the rest of {source} is lost)"
    return ReadFailure(reason="unreadable", source=source, offset=offset, message=message, rest=True)


class Part(Strict):
    """A stretch of one file that one task reads. It depends only on the input and the settings."""

    # stream: a whole file whose format follows from its content and name (pipeline/readers/files.py). lost: a folder, a
    # link or a file that could not be read when the corpus was searched; it gives one failure.
    format: Literal["jsonl", "text", "stream", "tar", "parquet", "arrow", "python", "topics", "lost"]
    path: str  # absolute local path, or an address with a protocol
    source: str  # name of the file relative to its input root, so that it stays the same when the corpus is moved
    start: int
    # [start, stop) in bytes of the file (jsonl, text, stream, python), in bytes of the uncompressed archive (tar), in
    # row groups (parquet), in record batches (arrow).
    stop: int
    # Input bytes (compressed if the file is). The parts of a file add up to its size (nearly, for Parquet).
    num_bytes: int
    weight: int  # approximate bytes of text; units have about the same sum of them


def _distinct(names: list[str]) -> list[str]:
    """Refuses a name that is given twice."""
    if len(set(names)) < len(names):
        raise ValueError("a name is given twice; name each key or column once")
    return names


TextField = str | Annotated[list[str], Field(min_length=1), AfterValidator(_distinct)]


class FilesCorpus(Strict):
    """JSONL, text, Markdown, html, docx, pdf, Parquet, Arrow, CSV, TSV; compressed (gz, xz, zst, bz2); tar."""

    kind: Literal["files"]
    paths: list[str] = Field(min_length=1)
    """Files, folders (without hidden names) or globs: local, s3://, gs://, hf://."""
    exclude: list[str] = Field(default_factory=list)
    """Patterns of paths to leave out, such as `drafts/*`; `*` also matches `/`."""
    format: Choice = "auto"
    """text: a document a line. text_file: a document a file. auto: by content, then name; .txt is text, in archives
    text_file. auto_text_file: .txt is text_file."""
    text_field: TextField = "text"
    """Key or column of the text; several, as in [title, body], are joined."""
    max_document_mib: float = MAX_DOCUMENT_MIB
    """Largest document, MiB; longer ones are cut."""


class OrderedFiles(FilesCorpus):
    """Files in the order of `paths`; only those of one entry are sorted."""

    numbers: bool = False  # True: whole numbers are texts, too, as in ids


class HubCorpus(Strict):
    """A dataset of the Hugging Face Hub, read from its data files; its scripts are never run."""

    kind: Literal["hub"]
    name: str = Field(pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """Name in the dataset's address, such as `allenai/c4`."""
    config: str | None = None
    """Configuration ("subset"); null: the default."""
    split: str = "train"
    """Split to read; validation_fraction is drawn from it."""
    revision: str | None = None
    """Branch, tag or commit; null: the newest commit."""
    text_field: TextField = "text"
    """Key or column of the text; several, as in [title, body], are joined."""
    max_document_mib: float = MAX_DOCUMENT_MIB
    """Largest document, MiB; longer ones are cut."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file found for a corpus."""

    path: str
    source: str
    num_bytes: int
    searched: bool  # True if found in a folder or by a glob, where files of unknown format are skipped and counted
    lost: bool = False  # True for a folder, a link or a file that cannot be read
    entry: int = 0  # number of its entry in the paths of `OrderedFiles`


def document_id(normalised: bytes) -> bytes:
    """16 bytes that identify a document: a hash of its normalised text in UTF-8, so that equal texts have equal ids."""
    return hashlib.blake2b(normalised, digest_size=ID_BYTES).digest()


@dataclass(frozen=True, slots=True)
class BlobRules:
    """Rules for reading a corpus of images or clips."""

    kind: str  # `images` or `audio`, for messages
    suffixes: frozenset[str]  # suffixes of files of images or clips
    setting: str  # setting that names the column
    column: str  # column of the images or clips in Parquet
    label_column: str


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for reading the files of a corpus."""

    format: Format | None  # format of all files; None detects it for each file
    text_names: Names  # keys or columns whose values are joined to a text
    max_bytes: int  # largest document
    keys: Keys = field(default_factory=dict)  # keys of several values to read instead of a text; none for texts
    max_file_bytes: int | None = None  # largest file, uncompressed; None: any
    blobs: BlobRules | None = None  # rules for images or clips; None for texts
    plain: Literal["text", "text_file"] = "text"  # format of a .txt outside an archive
    documents: bool = False  # True if html, docx and pdf files are read
    numbers: bool = False  # True if a whole number is a text, too

    @property
    def suffixes(self) -> Collection[str]:
        """Endings of the files that are read."""
        documents = DOCUMENT_SUFFIXES if self.documents else ()
        return sorted({*self.blobs.suffixes, ".parquet"}) if self.blobs else [*SUFFIXES, *documents]


def rules_of(
    corpus: FilesCorpus | HubCorpus,
    keys: Keys | None = None,
    max_file_bytes: int | None = None,
    blobs: BlobRules | None = None,
    documents: bool = False,
) -> Rules:
    """The rules of a corpus."""
    choice: Choice = corpus.format if isinstance(corpus, FilesCorpus) else "auto"
    fixed = None if choice == "auto" or choice == "auto_text_file" else choice
    plain: Literal["text", "text_file"] = "text" if choice == "auto" else "text_file"
    # An escaped surrogate pair takes twelve bytes; the least limit leaves room for a cut between two characters.
    max_bytes = max(_MIN_DOCUMENT_BYTES, int(corpus.max_document_mib * MIB))
    names = (corpus.text_field,) if isinstance(corpus.text_field, str) else tuple(corpus.text_field)
    numbers = isinstance(corpus, OrderedFiles) and corpus.numbers
    return Rules(fixed, names, max_bytes, keys or {}, max_file_bytes, blobs, plain, documents, numbers)


def missing(names: Names, present: Sequence[str], what: str = "column") -> str | None:
    """A message on the first of these names that was not found, with the nearest of those that were; else None."""
    for name in names:
        if name not in present:
            # a surrogate cannot be written
            whole = [item.encode("utf-8", "backslashreplace").decode() for item in present]
            hint = suggest(name, whole) if "," not in name else ""
            if what == "column" and "".join(whole).startswith("{"):
                hint = "; its lines are JSON: set corpus.format to jsonl"
            elif len(whole) == 1 and "\t" in whole[0]:  # the header was not cut
                hint = "; its columns are separated by tabs: set corpus.format to tsv"
            elif len(whole) == 1 and ";" in whole[0]:
                hint = "; its columns are separated by ;: write `sep=;` as its first line, or convert it to commas"
            return f"no {what} {name!r}; found {shorten(', '.join(whole), _SHOWN_CHARACTERS)}{hint}"
    return None


def joined(values: Iterable[bytes]) -> bytes:
    """The text of several values, empty ones left out."""
    return b"\n".join(value for value in values if value)
