"""Text of evaluation sets in documents: the index of their n-grams, and the search as in appendix C of the GPT-3 paper.

Brown et al. 2020 (arXiv:2005.14165): words in lower case without punctuation, n = 13; a document is contaminated if it
shares an n-gram with an evaluation set. Sentences are often shorter than 13 words, so an example of 8 to 12 words is
searched as a whole. Shorter ones are common phrases and are left out (appendix C uses no n below 8 either).

The search computes the hashes of a document's words and a rolling hash over the first 8 words of each possible entry
(its head; no entry is shorter). A bitmap of heads lets one place in sixteen pass, and only these get longer hashes and
a binary search. A hit is verified by BLAKE2b of its words, so that a false match needs two independent 64-bit hashes to
agree: probability 2**-128 a pair, about 3e-23 for all pairs of 1e10 n-grams of a corpus and 1e6 entries.
"""

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from declutr.common.config import Strict
from declutr.common.errors import UsageError
from declutr.common.paths import expand
from declutr.common.storage import atomic_file, hash_file, hash_json
from declutr.pipeline.filters.words import U64, extend_ngrams, folded_words, hash_folded, mix

INDEX = "contamination.arrow"
_NOT_DATA = re.compile(r"(?:\d*[-_]?)?(?:readme|licen[cs]e|changelog|notice|correlation)\b", re.IGNORECASE)
_QUESTION_LABEL = re.compile(r"^[A-Z]{3,6}:\w+\s")  # TREC's, as in `DESC:manner How ...`
_LONGEST_FIELD = 1 << 24
SCHEMA_VERSION = "1"
_SHORTEST_WHOLE = 8
_BITMAP_LOAD = 16


class Contamination(Strict):
    """Evaluation sets to search for, and the treatment of documents that hold text of them."""

    paths: list[str] = Field(min_length=1)
    """Files and folders of evaluation sets."""
    ngram: int = Field(default=13, ge=2, le=64)
    """Words in a row that make a match."""
    min_example_words: int = Field(default=_SHORTEST_WHOLE, ge=1)
    """Least words of an example shorter than `ngram`, searched whole."""
    action: Literal["report", "drop"] = "report"
    """report: record the match in the ledger. drop: drop the document."""
    max_matches: int = Field(default=0, ge=0)
    """Different n-grams that a document may share."""


@dataclass(frozen=True, slots=True)
class Match:
    """Text that a document shares with evaluation sets."""

    num_ngrams: int  # number of different n-grams or whole examples
    name: str  # evaluation set of the first one
    words: str  # the first one, as folded words


class ContaminationIndex:
    """The file that `build_index` writes, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Opens an index."""
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        if metadata.get("version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path} is a contamination index of version {metadata.get('version')!r}, but this code reads "
                f"version {SCHEMA_VERSION!r}; delete it, and it is built again"
            )
        self._names = metadata["names"].split("\n")
        self._lengths = sorted(map(int, metadata["lengths"].split()))
        self._keys: U64 = _column(table, "key")
        self._checks: U64 = _column(table, "check")
        self._sets = _column(table, "set")
        self._head_words = int(metadata["head"])
        self._shift = np.uint64(64 - max(13, (len(self._keys) * _BITMAP_LOAD).bit_length()))
        marks = np.zeros(1 << (64 - int(self._shift)), np.bool_)
        marks[mix(_column(table, "head")) >> self._shift] = True
        self._bitmap = np.packbits(marks, bitorder="little")

    def find(self, text: str) -> Match | None:
        """Finds text shared with the evaluation sets. The cost grows with the text's n-grams, not with the index."""
        words = hash_folded(text)
        heads = ngram_hashes(words, self._head_words)
        bits = mix(heads) >> self._shift
        marked = self._bitmap[bits >> np.uint64(3)] >> (bits & np.uint64(7)).astype(np.uint8) & 1
        places = np.flatnonzero(marked)
        hashes = heads[places]
        hits: list[tuple[int, int, int]] = []
        for length in range(self._head_words, self._lengths[-1] + 1 if self._lengths else 0):
            if length > self._head_words:
                inside = places + length <= len(words)
                places, hashes = places[inside], hashes[inside]
                hashes = extend_ngrams(hashes, words[places + length - 1])
            if length in self._lengths:
                keys = keys_of(hashes, length)
                rows = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)  # a key above all has no row
                same = self._keys[rows] == keys
                pairs = zip(places[same].tolist(), rows[same].tolist(), strict=True)
                hits += [(place, length, row) for place, row in pairs]  # row of the index
        return self._verify(text, sorted(hits)) if hits else None

    def _verify(self, text: str, hits: list[tuple[int, int, int]]) -> Match | None:
        """The match of those hits that the second hash confirms."""
        words = folded_words(text)
        seen: set[int] = set()
        first: tuple[int, str] | None = None
        for place, length, row in hits:
            ngram = " ".join(words[place : place + length])
            if row not in seen and check_of(ngram) == int(self._checks[row]):
                seen.add(row)
                first = first or (row, ngram)
        if first is None:
            return None
        return Match(len(seen), self._names[int(self._sets[first[0]])], first[1])


def check_of(ngram: str) -> int:
    """The second hash of an n-gram: BLAKE2b of its folded words, joined by spaces."""
    # An escape in JSON can be a lone surrogate.
    return int.from_bytes(hashlib.blake2b(ngram.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def ngram_hashes(words: U64, length: int) -> U64:
    """Hashes of all n-grams of a row of words, `(max(0, len(words) - length + 1),)`."""
    hashes = words
    for index in range(1, length):
        hashes = extend_ngrams(hashes[:-1], words[index:])
    return hashes


def keys_of(hashes: U64, length: int) -> U64:
    """Keys of n-grams in the index; n-grams of different lengths have equal keys only by chance."""
    return mix(hashes + np.uint64(length))


def _column(table: pa.Table, name: str) -> NDArray[np.uint64]:
    """A column as an array, without a copy of the mapped file."""
    return table.column(name).combine_chunks().to_numpy(zero_copy_only=False)


def contamination_problems(config: Contamination) -> list[str]:
    """Finds problems of the settings and the files, one line each."""
    problems = []
    for entry in config.paths:
        try:
            root = expand(entry)
        except UsageError as error:
            problems.append(f"filters.contamination.paths: {error}")
            continue
        if not root.exists():
            problems.append(f"filters.contamination.paths: {entry!r} does not exist; looked at {root.absolute()}")
            continue
        files = list(_files(root))
        if not files:
            problems.append(f"filters.contamination.paths: {entry!r} holds no files")
        for path, name in files:
            if any("\ud800" <= letter <= "\udfff" for letter in name):  # a byte that is not UTF-8, as Python reads it
                problems.append(f"filters.contamination.paths: the name {str(path)!r} is not UTF-8; rename the file")
            try:
                with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
                    is_text = b"\0" not in stream.read(8192)
                if not is_text:
                    problems.append(
                        f"filters.contamination.paths: {path} is not text; give JSONL, CSV, TSV or plain text"
                    )
            except (OSError, EOFError, zlib.error) as error:  # a .gz cut short, or damaged
                problems.append(f"filters.contamination.paths: {path} cannot be read: {error}")
    return problems


def build_index(config: Contamination, path: Path) -> None:
    """Writes the index of all evaluation sets. Its bytes depend on the settings and the files' contents and names.

    An entry that several sets hold is recorded for the first set by name. Memory: about 100 bytes an entry.
    """
    entries: dict[int, tuple[int, int, int]] = {}
    lengths: set[int] = set()
    named_files = dict.fromkeys((name, file) for root in config.paths for file, name in _files(expand(root)))
    sets = sorted(named_files, key=itemgetter(0))  # two sets of one name are both searched
    shortest = min(config.min_example_words, config.ngram)
    for number, (_, file) in enumerate(sets):
        for text in _texts(file):
            words = folded_words(text)
            if len(words) < shortest:
                continue
            length = min(config.ngram, len(words))
            lengths.add(length)
            hashes = hash_folded(text)
            heads = ngram_hashes(hashes, shortest)[: len(words) - length + 1]
            keys = keys_of(ngram_hashes(hashes, length), length)
            for place, (key, head) in enumerate(zip(keys.tolist(), heads.tolist(), strict=True)):
                if key not in entries:  # the first set by name, so that the order of paths does not show
                    entries[key] = (head, check_of(" ".join(words[place : place + length])), number)
    keys = np.fromiter(sorted(entries), np.uint64, len(entries))
    rows = [entries[key] for key in keys.tolist()]
    table = pa.table(
        {
            "key": pa.array(keys),
            "head": pa.array([head for head, _, _ in rows], pa.uint64()),
            "check": pa.array([check for _, check, _ in rows], pa.uint64()),
            "set": pa.array([number for _, _, number in rows], pa.uint32()),
        }
    ).replace_schema_metadata(
        {
            "version": SCHEMA_VERSION,
            "names": "\n".join(name for name, _ in sets),
            "lengths": " ".join(map(str, sorted(lengths))),
            "head": str(shortest),
        }
    )
    with atomic_file(path) as aside, pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def hash_sets(config: Contamination) -> str:
    """SHA-256 of the names and contents of the evaluation sets."""
    files = (file for entry in config.paths for file in _files(expand(entry)))
    return hash_json([[name, hash_file(path)] for path, name in files])


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    """The data files of an entry of `paths`, each with the name of its evaluation set."""
    if root.is_file():
        yield root, root.name
        return
    for path in sorted(root.rglob("*")):  # rglob's order is that of the file system
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and not _NOT_DATA.match(path.name):
            yield path, f"{root.name}/{relative.as_posix()}"


def _texts(path: Path) -> Iterator[str]:
    """Every text in a file: string values of JSON, cells of CSV, parts of lines between tabs."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, zlib.error) as error:  # as for any unreadable file; a .gz cut short, or damaged
            raise OSError(f"{path} cannot be read: {error}") from error
    try:
        content = raw.decode("utf-8-sig")  # a byte order mark would belong to the first word
    except UnicodeDecodeError:
        content = raw.decode("latin-1")  # as MR and TREC; every byte is valid there
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix in (".json", ".jsonl", ".ndjson"):
        yield from _json_texts(content)
    elif suffix == ".csv" and "\t" not in content[:_LONGEST_FIELD].partition("\n")[0]:
        csv.field_size_limit(max(_LONGEST_FIELD, len(content)))  # Python's own limit is 128 Ki characters
        for row in csv.reader(io.StringIO(content, newline="")):  # `splitlines` would end lines at U+2028, too
            yield from row
    else:  # STS Benchmark's .csv has tabs between its cells and unpaired quotes
        for line in content.split("\n"):
            yield from (_QUESTION_LABEL.sub("", cell) for cell in line.split("\t"))


def _json_texts(content: str) -> Iterator[str]:
    """The strings in a JSON value or in one a line, at any depth; a line that is not JSON counts as one text."""
    try:
        waiting: list[Any] = [json.loads(content)]
    except (ValueError, RecursionError):  # nested too deeply
        lines = content.split("\n")
        yield from lines if len(lines) == 1 else (text for line in lines for text in _json_texts(line))
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += reversed(value.values())  # `pop` takes the last
        elif isinstance(value, list):
            waiting += reversed(value)  # `pop` takes the last
