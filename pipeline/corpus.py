"""Where documents come from: the files of a corpus, cut into parts that can be read independently."""

import glob
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from common.config import Strict, expand
from pipeline.schema import ID_BYTES

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".text": "text", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True)
class Document:
    """One document as read: raw text and where it stood (`offset` as in pipeline/schema.py)."""

    text: str
    source: str
    offset: int


class Failure(Strict):
    """One document, or the rest of one file, that could not be read."""

    reason: str
    source: str
    offset: int
    message: str


class Part(Strict):
    """A stretch of one file that is read by one task."""

    format: Literal["jsonl", "text", "parquet", "python", "topics"]
    path: str
    source: str
    """Name of the file relative to its input root: stable when the corpus is moved."""
    start: int
    stop: int
    """Bytes [start, stop) of a plain file; the whole of a .gz file; row groups [start, stop) of a Parquet file."""
    num_bytes: int
    """Input bytes (compressed, where the file is)."""


class FilesCorpus(Strict):
    """JSONL, plain text (one document a line) and Parquet files. JSONL and text may be gzipped."""

    kind: Literal["files"]
    paths: list[str] = Field(min_length=1)
    """Files, folders (searched recursively, hidden names left out) or globs."""
    format: Literal["auto", "jsonl", "text", "parquet"] = "auto"
    """auto goes by the name: .jsonl .ndjson .txt .text .parquet, the first four also with .gz."""
    text_field: str = "text"
    """Key or column that holds the text in JSONL and Parquet."""


def normalise(text: str) -> str:
    """The text with whitespace collapsed to single spaces and stripped at both ends. Case is kept."""
    return " ".join(text.split())


def document_id(normalised: bytes) -> bytes:
    """16 bytes that name a document: a hash of its normalised text in UTF-8, so that equal texts have equal names."""
    return hashlib.blake2b(normalised, digest_size=ID_BYTES).digest()


def file_parts(corpus: FilesCorpus, part_bytes: int) -> tuple[list[Part], list[str]]:
    """Cuts the corpus into parts of about `part_bytes`, in an order that depends on names alone.

    Returns:
        The parts, and what is wrong with the inputs: one line a problem.
    """
    found: dict[Path, tuple[str, str]] = {}
    problems: list[str] = []
    for given in corpus.paths:
        matches = list(_matches(given))
        if not matches:
            problems.append(f"corpus.paths: {given!r} matches no file; looked at {expand(given).absolute()}")
        for path, source, searched in matches:
            file_format = SUFFIXES.get(_bare_suffix(path)) if corpus.format == "auto" else corpus.format
            if file_format:
                found.setdefault(path.resolve(), (source, file_format))
            elif not searched:
                problems.append(
                    f"corpus.paths: cannot tell the format of {given!r} by its name; set corpus.format to jsonl, "
                    "text or parquet"
                )
        if matches and not any(path.resolve() in found for path, _, _ in matches):
            problems.append(f"corpus.paths: {given!r} holds no file named like {' '.join(SUFFIXES)} (.gz allowed)")
    sources = Counter(source for source, _ in found.values())
    parts: list[Part] = []
    for path in sorted(found, key=lambda path: (found[path][0], str(path))):
        source, file_format = found[path]
        source = source if sources[source] == 1 else str(path)
        if file_format == "parquet":
            row_groups, problem = _parquet_parts(path, source, corpus.text_field)
            parts += row_groups
            problems += [problem] if problem else []
        else:
            parts += _line_parts(path, source, file_format, part_bytes)
    return parts, list(dict.fromkeys(problems))


def _matches(given: str) -> Iterator[tuple[Path, str, bool]]:
    """Files that one entry of `paths` stands for: path, source, and whether they were found by searching."""
    root = expand(given)
    if root.is_file():
        yield root, root.name, False
    elif root.is_dir():
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            if path.is_file() and not _is_hidden(relative):
                yield path, relative.as_posix(), True
    elif glob.has_magic(str(root)):
        num_plain = next(number for number, part in enumerate(root.parts) if glob.has_magic(part))
        plain = Path(*root.parts[:num_plain])
        for path in sorted(plain.glob(str(Path(*root.parts[num_plain:])))):
            if path.is_file() and not _is_hidden(path.relative_to(plain)):
                yield path, path.relative_to(plain).as_posix(), True


def _is_hidden(relative: Path) -> bool:
    """Whether a name on the way from the input root starts with a dot."""
    return any(name.startswith(".") for name in relative.parts)


def _bare_suffix(path: Path) -> str:
    """The suffix that tells the format: `.jsonl` of `a.jsonl.gz`."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _line_parts(path: Path, source: str, file_format: str, part_bytes: int) -> list[Part]:
    """Byte ranges of a plain file, one part for a compressed one. A line belongs to the range its first byte is in."""
    size = path.stat().st_size
    count = 1 if path.suffix == ".gz" else max(1, -(-size // part_bytes))
    cuts = [size * i // count for i in range(count + 1)]
    return [
        Part.model_validate(
            {"format": file_format, "path": str(path), "source": source}
            | {"start": start, "stop": stop, "num_bytes": stop - start}
        )
        for start, stop in pairwise(cuts)
    ]


def _parquet_parts(path: Path, source: str, text_field: str) -> tuple[list[Part], str | None]:
    """One part a row group, or the reason why the file cannot be read."""
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as error:
        return [], f"corpus.paths: {path} cannot be read as Parquet: {error}"
    columns = metadata.schema.to_arrow_schema().names
    if text_field not in columns:
        return [], f"corpus.text_field = {text_field!r}: {path} has the columns {columns}"
    return [
        Part(
            format="parquet",
            path=str(path),
            source=source,
            start=group,
            stop=group + 1,
            num_bytes=metadata.row_group(group).total_byte_size,
        )
        for group in range(metadata.num_row_groups)
    ], None
