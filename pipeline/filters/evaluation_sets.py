"""The texts of evaluation sets, and the index of their n-grams that workers search documents with."""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from declutr.common.errors import UsageError
from declutr.common.paths import expand
from declutr.common.storage import atomic_file, hash_file, hash_json
from declutr.pipeline.filters.contamination import SCHEMA_VERSION, Contamination, check_of, keys_of, ngram_hashes
from declutr.pipeline.filters.words import folded_words, hash_folded

INDEX = "contamination.arrow"
_NOT_DATA = re.compile(r"(?:\d*[-_]?)?(?:readme|licen[cs]e|changelog|notice|correlation)\b", re.IGNORECASE)
_QUESTION_LABEL = re.compile(r"^[A-Z]{3,6}:\w+\s")
_LONGEST_FIELD = 1 << 24


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
        files = [path for path, _ in _files(root)]
        if not files:
            problems.append(f"filters.contamination.paths: {entry!r} holds no files")
        for path in files:
            try:
                if b"\0" in _head(path):
                    problems.append(
                        f"filters.contamination.paths: {path} is not text; give JSONL, CSV, TSV or plain text"
                    )
            except (OSError, EOFError, zlib.error) as error:
                problems.append(f"filters.contamination.paths: {path} cannot be read: {error}")
    return problems


def build_index(config: Contamination, path: Path) -> None:
    """Writes the index of all evaluation sets. Its bytes depend on the settings and the files' contents and names.

    An entry that several sets hold is recorded for the first set by name. Memory: about 100 bytes an entry.

    Raises:
        OSError: a file cannot be read (`contamination_problems` reports this earlier).
    """
    entries: dict[int, tuple[int, int, int]] = {}
    lengths: set[int] = set()
    named_files = dict.fromkeys((name, file) for root in config.paths for file, name in _files(expand(root)))
    sets = sorted(named_files, key=itemgetter(0))
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
                if key not in entries:
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
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and not _NOT_DATA.match(path.name):
            yield path, f"{root.name}/{relative.as_posix()}"


def _head(path: Path) -> bytes:
    """The first bytes of a file, uncompressed."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
        return stream.read(8192)


def _texts(path: Path) -> Iterator[str]:
    """Every text in a file: string values of JSON, cells of CSV, parts of lines between tabs."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, zlib.error) as error:
            raise OSError(f"{path} cannot be read: {error}") from error
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        content = raw.decode("latin-1")  # as MR and TREC; every byte is valid there
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix == ".json":
        yield from _json_texts(content)
    elif suffix in (".jsonl", ".ndjson"):
        for line in content.splitlines():
            yield from _json_texts(line)
    elif suffix == ".csv" and "\t" not in content[:_LONGEST_FIELD].partition("\n")[0]:
        csv.field_size_limit(max(_LONGEST_FIELD, len(content)))
        for row in csv.reader(content.splitlines(keepends=True)):
            yield from row
    else:  # STS Benchmark's .csv has tabs between its cells and unpaired quotes
        for line in content.split("\n"):
            yield from (_QUESTION_LABEL.sub("", cell) for cell in line.split("\t"))


def _json_texts(content: str) -> Iterator[str]:
    """The strings in a JSON value, at any depth; content that is not JSON counts as one text."""
    try:
        waiting: list[Any] = [json.loads(content)]
    except (ValueError, RecursionError):
        yield content
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += reversed(value.values())
        elif isinstance(value, list):
            waiting += reversed(value)
