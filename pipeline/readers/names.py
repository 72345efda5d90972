"""File names: the format that a suffix stands for, and hidden names."""

from declutr.pipeline.readers.corpus import Format
from declutr.pipeline.readers.streams import COMPRESSED_SUFFIXES

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
}
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"})
AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".oga", ".opus"})
MARKDOWN = {".md", ".markdown", ".rst"}
JSON_SUFFIX = ".json"
"""Read as JSON Lines if the file is named explicitly, or if its first line is an object with the key of the text; in a
searched folder it is more often a description."""
TAR_SUFFIX = ".tar"


def bare_suffix(name: str) -> str:
    """The suffix of the format: `.jsonl` of `a.jsonl.gz`, `.tar` of `a.tgz`."""
    base = name.rpartition("/")[2].lower()
    member = base.rpartition("!")[2]  # of an archive
    stem, suffix = _split(base if member.startswith(".") else member)
    return suffix if suffix not in COMPRESSED_SUFFIXES else COMPRESSED_SUFFIXES[suffix] or _split(stem)[1]


def _split(name: str) -> tuple[str, str]:
    """Splits a file name at its last dot; pathlib would take half the time of reading a small member."""
    stem, _, ending = name.rpartition(".")
    return (stem, f".{ending}") if stem else (name, "")


def is_hidden(relative: str) -> bool:
    """Returns True if a part of a relative path starts with a dot."""
    return any(name.startswith(".") and name not in (".", "..") for name in relative.split("/"))
