"""Counts of the files that a search of folders skips, by kind and with an example."""

import re
from collections import Counter

from declutr.common.config import Strict
from declutr.pipeline.readers.corpus import DOCUMENT_SUFFIXES, JSON_SUFFIX, bare_suffix

MAX_KINDS = 50
OTHERS = "others"
NO_ENDING = "no ending"
LINKED_FOLDER = "links to folders"
FOLDER = "folders that match a pattern"
EXCLUDED = "excluded by corpus.exclude"
SECOND = "second names of files, and links to them"
SPECIAL = "pipes, sockets and devices"
CACHES = "caches of datasets"
SPLITS = "dataset_dict.json"
UNREADABLE = "unreadable"
"""Kind of folders, links and files that cannot be read. Each of them also gives a failure record."""

# What Spark, Dask, Delta Lake and archivers leave beside the data; `map` of datasets leaves copies of all rows.
_LEFT = re.compile(r"(?:_common)?_metadata|_SUCCESS|_(?:committed|started)_\w+|desktop\.ini|Thumbs\.db", re.ASCII)
_LEFT_FOLDERS = frozenset(("_temporary", "_delta_log", "__MACOSX"))
_CACHE = re.compile(r"cache-[0-9a-f]{16}(?:_\d{5}_of_\d{5})?\.arrow")
_ENDING = re.compile(r"\.[a-z0-9]{1,10}")
_MARKUP = "extract the text first (for example with trafilatura), or read the markup with corpus.format=text_file"
_ADVICE = {
    JSON_SUFFIX: "their first object lacks the key of the text (corpus.text_field)",
    ".xml": _MARKUP,
    **dict.fromkeys(DOCUMENT_SUFFIXES, "pip install lxml mammoth pypdfium2, and they are read as documents"),
    **dict.fromkeys((".doc", ".odt", ".rtf", ".epub"), "convert them to text, Markdown or JSONL"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the tables as CSV or TSV"),
    **dict.fromkeys((".lz4", ".br", ".lzma", ".lzo", ".z", ".sz"), "compress them again with zstd, gzip, xz or bzip2"),
    ".warc": "their records are pages of HTML; read the WET files of the same crawl, or extract the text first",
    **dict.fromkeys((".zip", ".7z", ".rar"), "unpack them, or pack them as tar"),
    CACHES: "they repeat the rows beside them; name them in corpus.paths to read them",
    SPLITS: "it lists splits, and all of them are read; name the folder of one in corpus.paths to read it alone",
    FOLDER: "name them in corpus.paths, or use ** in the pattern",
    LINKED_FOLDER: "name them in corpus.paths",
}


def left_by_programs(source: str) -> str | None:
    """The kind of a file that a program leaves beside data; None for another one. `source`: relative to the input."""
    *folders, name = source.split("/")
    if _LEFT.fullmatch(name) or not _LEFT_FOLDERS.isdisjoint(folders):
        return "left by programs"
    return CACHES if _CACHE.fullmatch(name) else SPLITS if name == SPLITS else None


class Skip(Strict):
    """Files of one kind that were not read."""

    files: int
    example: str  # the first of them by name, relative to its input root


class Skipped:
    """Counts skipped files by suffix, and other entries by kind."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, kind: str, source: str) -> None:
        """Counts one more file of this kind."""
        # The manifest must not grow with names.
        kind = kind if kind in self._counts or len(self._counts) < MAX_KINDS else OTHERS
        self._counts[kind] += 1
        printable = source.encode("utf-8", "backslashreplace").decode()  # a name may have bytes that are not UTF-8
        # The first by name, whatever the order of the search.
        self._examples[kind] = min(self._examples.get(kind, printable), printable)

    def add_file(self, source: str) -> None:
        """Counts a file by its suffix."""
        ending = bare_suffix(source) or NO_ENDING
        self.add(ending if ending == NO_ENDING or _ENDING.fullmatch(ending) else OTHERS, source)

    def kinds(self) -> dict[str, Skip]:
        """Every kind, the most frequent first."""
        # By name last, so that ties have one order.
        ranked = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return {kind: Skip(files=number, example=self._examples[kind]) for kind, number in ranked}


def describe_skipped(kinds: dict[str, Skip]) -> list[str]:
    """A line for all kinds of files that are not read, with examples and remedies, and one for unreadable files."""
    lines = []
    if parts := [f"{s.files:,} {kind} (such as {s.example!r})" for kind, s in kinds.items() if kind != UNREADABLE]:
        remedies: dict[str, list[str]] = {}
        for kind in kinds:
            if kind in _ADVICE:
                remedies.setdefault(_ADVICE[kind], []).append(kind)
        advice = "".join(f"; {', '.join(names)}: {remedy}" for remedy, names in remedies.items())
        lines.append(f"not read: {', '.join(parts)}{advice}")
    if lost := kinds.get(UNREADABLE):
        what = "folders, links and files cannot be read, and each counts as a failure"
        lines.append(f"{lost.files:,} {what} (for example {lost.example!r})")
    return lines


def advice_on(name: str) -> str:
    """A remedy for a named file of unknown format; empty if none is known."""
    advice = _ADVICE.get(bare_suffix(name))
    return f"; {advice}" if advice else ""
