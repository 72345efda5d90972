"""The name of a file: what it tells of the format, and whether a search passes it over."""

from pipeline.readers.corpus import Format
from pipeline.readers.streams import COMPRESSED_SUFFIXES

SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text_file",
    ".markdown": "text_file",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
}
MARKDOWN = {".md", ".markdown"}
JSON_SUFFIX = ".json"
"""JSON Lines by another name, where a file is asked for; in a searched folder it is more often a description."""
TAR_SUFFIX = ".tar"


def bare_suffix(name: str) -> str:
    """The suffix that tells the format: `.jsonl` of `a.jsonl.gz`, `.tar` of `a.tgz`."""
    stem, suffix = _split(name.rpartition("/")[2].lower())
    return suffix if suffix not in COMPRESSED_SUFFIXES else COMPRESSED_SUFFIXES[suffix] or _split(stem)[1]


def _split(name: str) -> tuple[str, str]:
    """A file name before and from its last dot, without pathlib, which would be half the time of a small member."""
    stem, _, ending = name.rpartition(".")
    return (stem, f".{ending}") if stem else (name, "")


def is_hidden(relative: str) -> bool:
    """Whether a name on the way from the input root starts with a dot."""
    return any(name.startswith(".") and name not in (".", "..") for name in relative.split("/"))
