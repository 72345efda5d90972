"""The files of a corpus and the parts they are cut into, from names, sizes, file heads and directories alone."""

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from common.stores.address import is_remote
from pipeline.readers.archives import find_members, is_tar
from pipeline.readers.corpus import END, FilesCorpus, HubCorpus, Input, Part
from pipeline.readers.encodings import encoding_of
from pipeline.readers.files import Rules, format_of, rules_of
from pipeline.readers.hub import hub_inputs
from pipeline.readers.inputs import corpus_files
from pipeline.readers.names import JSON_SUFFIX, SUFFIXES, TAR_SUFFIX, bare_suffix
from pipeline.readers.places import open_input, stream_of
from pipeline.readers.skipped import UNREADABLE, Skipped, advice_on
from pipeline.readers.streams import (
    BLOCK_BYTES,
    READ_ERRORS,
    Allowance,
    ByteStream,
    compression_of,
    decompressed,
)
from pipeline.readers.tables import TABLE_ERRORS, column_problem

COMPRESSION_RATIO = 3
"""Assumed ratio of English text to its compressed size, by which parts of compressed files are weighted."""
MAX_ARCHIVE_PARTS = 64
"""Most parts of a compressed archive, because each part has to decompress everything before it."""
_THREADS = 32
_HEAD_BYTES = 4096
_PEEKED_BYTES = 1 << 14
_SHOWN_PROBLEMS = 20


class Cut(NamedTuple):
    """The parts and the problem of one file."""

    parts: list[Part]
    problem: str | None = None
    """Problem of the file. With parts, reading counts it as a failure; without parts, the corpus is refused."""
    skipped: bool = False
    """True if a search met the file and its format is unknown."""


def file_parts(
    corpus: FilesCorpus | HubCorpus, part_bytes: int, skipped: Skipped | None = None
) -> tuple[list[Part], list[str]]:
    """Cuts the corpus into parts of about `part_bytes`, in an order that depends only on names.

    Args:
        corpus: settings.
        part_bytes: bytes of text in a part.
        skipped: counts the files that a search met and did not take.

    Returns:
        The parts, and the problems of the inputs, one line each.
    """
    skipped = Skipped() if skipped is None else skipped
    rules = rules_of(corpus)
    if isinstance(corpus, HubCorpus):
        found, problems = hub_inputs(corpus)
    else:
        found, problems = corpus_files(corpus, skipped)
    unique = {file.path: file for file in reversed(found)}
    sources = Counter(file.source for file in unique.values())
    files = [
        file if sources[file.source] == 1 else replace(file, source=file.path)
        for file in sorted(unique.values(), key=lambda file: (file.source, file.path))
    ]
    parts: list[Part] = []
    failing: list[str] = []
    num_good = 0
    for file, cut in zip(files, _cut_all(files, rules, part_bytes), strict=True):
        parts += cut.parts
        num_good += bool(cut.parts) and cut.problem is None
        if cut.skipped:
            skipped.add_file(file.source)
        elif cut.problem:
            (failing if cut.parts else problems).append(cut.problem)
        if file.lost or (cut.problem and cut.parts and cut.parts[0].format == "lost"):
            skipped.add(UNREADABLE, file.source)
    if failing and not num_good:  # nothing can be read, so most likely a setting is wrong
        problems += failing[:_SHOWN_PROBLEMS]
    if not parts and files and not problems:
        problems.append(
            f"corpus.paths: no file found is named like {' '.join(SUFFIXES)} or is an archive of such files"
        )
    return parts, list(dict.fromkeys(problems))


def _cut_all(files: list[Input], rules: Rules, part_bytes: int) -> Iterable[Cut]:
    """The parts of each file, in order. Remote files are examined in parallel."""
    if not any(is_remote(file.path) for file in files):
        for file in files:
            yield _cut_file(file, rules, part_bytes)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(lambda file: _cut_file(file, rules, part_bytes), files)


def _cut_file(file: Input, rules: Rules, part_bytes: int) -> Cut:
    """The parts of one file, or its problem. Damage inside the file is found when it is read."""
    if file.lost:
        return _lost(file, "it cannot be read")
    try:
        with open_input(file.path) as opened:
            head = opened.read(_HEAD_BYTES)
            compression = compression_of(head)
            if compression:
                return _cut_compressed(file, opened, compression, rules, part_bytes)
            if is_tar(head) or (rules.format is None and bare_suffix(file.source) == TAR_SUFFIX):
                stream = stream_of(opened, file.path)
                if not is_remote(file.path):  # seek from header to header; for remote files plain reading is faster
                    stream = ByteStream(opened.read, 0, BLOCK_BYTES, opened.seek)
                return Cut(_cut_archive(file, stream, part_bytes, 1))
            known = rules.format or format_of(head, file.source, inside=False)
            if known is None or (file.searched and rules.format is None and bare_suffix(file.source) == JSON_SUFFIX):
                return _unknown(file)
            if known in ("jsonl", "text") and encoding_of(head) is None:
                return Cut(_ranges(file, known, part_bytes))
            if known == "parquet":
                return _cut_parquet(file, opened, rules.text_field, part_bytes)
            if known == "arrow" and head.startswith(b"ARROW1"):
                return _cut_arrow(file, opened, rules.text_field, part_bytes)
            return Cut([_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes)])
    except OSError as error:
        if file.searched and not is_remote(file.path):
            return _lost(file, str(error))
        return Cut([], f"corpus.paths: {file.path} cannot be read: {error}")


def _lost(file: Input, why: str) -> Cut:
    """A part that gives one failure, and a problem in case no other file can be read."""
    return Cut([_part(file, "lost", 0, 0, 0, 0)], f"corpus.paths: {file.path} cannot be read: {why}")


def _unknown(file: Input) -> Cut:
    """The problem of an explicitly named file of unknown format; a file met by a search is skipped."""
    if file.searched:
        return Cut([], skipped=True)
    return Cut(
        [],
        f"corpus.paths: the format of {file.path!r} is unknown; set corpus.format to jsonl, text, "
        f"text_file, parquet, arrow, csv or tsv{advice_on(file.source)}",
    )


def _cut_compressed(file: Input, opened: BinaryIO, compression: str, rules: Rules, part_bytes: int) -> Cut:
    """The parts of a compressed file: one, unless it is an archive larger than a part."""
    weight = file.num_bytes * COMPRESSION_RATIO
    whole = [_part(file, "stream", 0, file.num_bytes, file.num_bytes, weight)]
    suffix = bare_suffix(file.source)
    named = rules.format is not None or suffix in SUFFIXES or suffix in (TAR_SUFFIX, JSON_SUFFIX)
    if named and weight <= part_bytes:
        return Cut(whole)
    opened.seek(0)
    beginning = ByteStream(opened.read, 0, _PEEKED_BYTES)
    try:
        head = decompressed(beginning, compression, Allowance(beginning), BLOCK_BYTES).peek(BLOCK_BYTES)
    except READ_ERRORS:
        return Cut(whole)
    if is_tar(head) and weight > part_bytes:
        whole_file = stream_of(opened, file.path)
        inner = decompressed(whole_file, compression, Allowance(whole_file))
        return Cut(_cut_archive(file, inner, part_bytes, MAX_ARCHIVE_PARTS))
    nested = is_tar(head) or compression_of(head) is not None
    return Cut(whole) if named or nested or format_of(head, file.source, inside=False) else _unknown(file)


def _cut_archive(file: Input, stream: ByteStream, part_bytes: int, max_parts: int) -> list[Part]:
    """Parts of consecutive members of an archive. The last part of a broken archive extends to the damage.

    A compressed archive is cut into at most `max_parts`; 1 means that it is not compressed.
    """
    starts, end = find_members(stream)
    size = end or stream.position
    least = max(part_bytes, -(-size // max_parts)) if max_parts > 1 else part_bytes
    cuts = [0]
    for start in starts:
        if start - cuts[-1] >= least:
            cuts.append(start)
    stops = [*cuts[1:], end or END]
    shares = [file.num_bytes * cut // max(1, size) for cut in cuts[1:]]
    bounds = [0, *shares, file.num_bytes]
    if max_parts == 1:
        bounds = [*cuts, max(cuts[-1], file.num_bytes)]
    return [
        _part(file, "tar", start, stop, high - low, min(stop, size) - start)
        for start, stop, (low, high) in zip(cuts, stops, pairwise(bounds), strict=True)
    ]


def _ranges(file: Input, known: str, part_bytes: int) -> list[Part]:
    """Byte ranges of a plain file. A line belongs to the range of its first byte."""
    count = max(1, -(-file.num_bytes // part_bytes))
    cuts = [file.num_bytes * i // count for i in range(count + 1)]
    return [_part(file, known, start, stop, stop - start, stop - start) for start, stop in pairwise(cuts)]


def _cut_parquet(file: Input, opened: BinaryIO, text_field: str, part_bytes: int) -> Cut:
    """Parts of consecutive row groups of a Parquet file."""
    try:
        with pq.ParquetFile(opened) as table:
            metadata = table.metadata
            problem = column_problem(table.schema_arrow, text_field)
            paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    except TABLE_ERRORS:
        return Cut([_part(file, "parquet", 0, END, file.num_bytes, file.num_bytes)])
    if problem:
        return _without_text(file, "parquet", text_field, problem)
    column = paths.index(text_field)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    weights = [max(0, group.column(column).total_uncompressed_size) for group in groups]
    sizes = [max(0, group.total_byte_size) for group in groups]
    return Cut(_grouped(file, "parquet", weights, sizes, part_bytes))


def _without_text(file: Input, known: str, text_field: str, problem: str) -> Cut:
    """The part of a table without a text column; it gives a failure for each row."""
    part = _part(file, known, 0, END if known == "parquet" else file.num_bytes, file.num_bytes, 0)
    return Cut([part], f"corpus.text_field = {text_field!r}: {file.path}: {problem}")


def _cut_arrow(file: Input, opened: BinaryIO, text_field: str, part_bytes: int) -> Cut:
    """Parts of consecutive record batches of an Arrow file, about the same number in each."""
    try:
        reader = pa.ipc.open_file(opened)
        problem = column_problem(reader.schema, text_field)
        count = reader.num_record_batches
    except TABLE_ERRORS:
        return Cut([_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes)])
    if problem:
        return _without_text(file, "stream", text_field, problem)
    sizes = [file.num_bytes // max(1, count)] * count
    return Cut(_grouped(file, "arrow", sizes, sizes, part_bytes))


def _grouped(file: Input, known: str, weights: list[int], sizes: list[int], part_bytes: int) -> list[Part]:
    """Parts of consecutive pieces (row groups, record batches), each except the last of at least `part_bytes`."""
    cuts = [0]
    held = 0
    for number, weight in enumerate(weights, 1):
        held += weight
        if held >= part_bytes or number == len(weights):
            cuts.append(number)
            held = 0
    total = max(1, sum(sizes))
    return [
        _part(file, known, start, stop, file.num_bytes * sum(sizes[start:stop]) // total, sum(weights[start:stop]))
        for start, stop in pairwise(cuts)
    ]


def _part(file: Input, known: str, start: int, stop: int, num_bytes: int, weight: int) -> Part:
    values = {"format": known, "path": file.path, "source": file.source, "start": start, "stop": stop}
    return Part.model_validate(values | {"num_bytes": num_bytes, "weight": weight})
