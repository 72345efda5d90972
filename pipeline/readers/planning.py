"""Which files a corpus stands for, and the parts they are cut into: from names, sizes, heads and directories alone."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from common.address import is_remote
from common.config import expand
from pipeline.corpus import END, FilesCorpus, HubCorpus, Input, Part
from pipeline.readers.archives import find_members, is_tar
from pipeline.readers.encodings import encoding_of
from pipeline.readers.files import JSON_SUFFIX, SUFFIXES, TAR_SUFFIX, Rules, bare_suffix, format_of, rules_of
from pipeline.readers.hub import hub_inputs
from pipeline.readers.places import find_inputs, open_input, stream_of
from pipeline.readers.streams import (
    BLOCK_BYTES,
    COMPRESSED_SUFFIXES,
    READ_ERRORS,
    Allowance,
    ByteStream,
    compression_of,
    decompressed,
)
from pipeline.readers.tables import TABLE_ERRORS, column_problem

COMPRESSION_RATIO = 3
"""English text is about three times its compressed size: units are cut by the work in them."""
MAX_ARCHIVE_PARTS = 64
"""Every part of a compressed archive decompresses what lies before it."""
_THREADS = 32
_HEAD_BYTES = 4096
_PEEKED_BYTES = 1 << 14

Cut = tuple[list[Part], str | None]


def file_parts(corpus: FilesCorpus | HubCorpus, part_bytes: int) -> tuple[list[Part], list[str]]:
    """Cuts the corpus into parts of about `part_bytes`, in an order that depends on names alone.

    Returns:
        The parts, and what is wrong with the inputs: one line a problem.
    """
    rules = rules_of(corpus)
    if isinstance(corpus, HubCorpus):
        found, problems = hub_inputs(corpus)
    else:
        found, problems = _files(corpus)
    unique = {file.path: file for file in reversed(found)}
    sources = Counter(file.source for file in unique.values())
    files = [
        file if sources[file.source] == 1 else Input(file.path, file.path, file.num_bytes, file.searched)
        for file in sorted(unique.values(), key=lambda file: (file.source, file.path))
    ]
    parts: list[Part] = []
    for file_cut, problem in _cut_all(files, rules, part_bytes):
        parts += file_cut
        problems += [problem] if problem else []
    if not parts and files and not problems:
        problems.append(
            f"corpus.paths: no file found is named like {' '.join(SUFFIXES)} or is an archive of such files"
        )
    return parts, list(dict.fromkeys(problems))


def _files(corpus: FilesCorpus) -> tuple[list[Input], list[str]]:
    """The files of all entries of `paths`."""
    found: list[Input] = []
    problems: list[str] = []
    for given in corpus.paths:
        try:
            matches = list(find_inputs(given))
        except OSError as error:
            problems.append(f"corpus.paths: {given!r} cannot be listed: {error}")
            continue
        unnamed = [file for file in matches if not _is_unicode(file.source)]
        problems += [f"corpus.paths: the name {file.path!r} is not UTF-8; rename the file" for file in unnamed]
        if not matches:
            where = given if is_remote(given) else expand(given).absolute()
            problems.append(f"corpus.paths: {given!r} matches no file; looked at {where}")
        usable = [
            file for file in matches if not file.searched or corpus.format != "auto" or _is_candidate(file.source)
        ]
        if matches and not usable:
            problems.append(
                f"corpus.paths: {given!r} holds no file named like {' '.join(SUFFIXES)} or an archive of them"
            )
        found += usable
    return found, problems


def _is_unicode(name: str) -> bool:
    """Whether a name can be written down; file systems allow any bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _is_candidate(name: str) -> bool:
    """Whether a file of a searched folder may be one of ours: by its name, or compressed, where its content tells."""
    suffix = bare_suffix(name)
    compressed = any(name.lower().endswith(ending) for ending in COMPRESSED_SUFFIXES)
    return suffix in SUFFIXES or suffix == TAR_SUFFIX or compressed


def _cut_all(files: list[Input], rules: Rules, part_bytes: int) -> Iterator[Cut]:
    """The parts of each file, in order. Far away, many files are looked at together."""
    if not any(is_remote(file.path) for file in files):
        for file in files:
            yield _cut_file(file, rules, part_bytes)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(lambda file: _cut_file(file, rules, part_bytes), files)


def _cut_file(file: Input, rules: Rules, part_bytes: int) -> Cut:
    """The parts of one file, or what is wrong with it. Damage inside is not looked for here: reading records it."""
    try:
        with open_input(file.path) as opened:
            head = opened.read(_HEAD_BYTES)
            compression = compression_of(head)
            if compression:
                return _cut_compressed(file, opened, compression, rules, part_bytes)
            if is_tar(head) or (rules.format is None and bare_suffix(file.source) == TAR_SUFFIX):
                stream = stream_of(opened, file.path)
                if not is_remote(file.path):  # from header to header; far away, reading on is quicker
                    stream = ByteStream(opened.read, 0, BLOCK_BYTES, opened.seek)
                return _cut_archive(file, stream, part_bytes, 1), None
            known = rules.format or format_of(head, file.source, inside=False)
            if known is None or (file.searched and rules.format is None and bare_suffix(file.source) == JSON_SUFFIX):
                return [], _unknown(file)
            if known in ("jsonl", "text") and encoding_of(head) is None:
                return _ranges(file, known, part_bytes), None
            if known == "parquet":
                return _cut_parquet(file, opened, rules.text_field, part_bytes)
            if known == "arrow" and head.startswith(b"ARROW1"):
                return _cut_arrow(file, opened, rules.text_field, part_bytes)
            return [_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes)], None
    except OSError as error:
        return [], f"corpus.paths: {file.path} cannot be read: {error}"


def _unknown(file: Input) -> str | None:
    """The problem of a file that was named but cannot be read; one that was merely met is passed over."""
    if file.searched:
        return None
    return (
        f"corpus.paths: cannot tell the format of {file.path!r} by its name; set corpus.format to jsonl, text, "
        "text_file, parquet, arrow, csv or tsv"
    )


def _cut_compressed(file: Input, opened: BinaryIO, compression: str, rules: Rules, part_bytes: int) -> Cut:
    """One part, unless it is an archive larger than a part."""
    weight = file.num_bytes * COMPRESSION_RATIO
    whole = [_part(file, "stream", 0, file.num_bytes, file.num_bytes, weight)]
    suffix = bare_suffix(file.source)
    named = rules.format is not None or suffix in SUFFIXES or suffix in (TAR_SUFFIX, JSON_SUFFIX)
    if named and weight <= part_bytes:
        return whole, None
    opened.seek(0)
    beginning = ByteStream(opened.read, 0, _PEEKED_BYTES)
    try:
        head = decompressed(beginning, compression, Allowance(beginning), BLOCK_BYTES).peek(BLOCK_BYTES)
    except READ_ERRORS:
        return whole, None
    if is_tar(head) and weight > part_bytes:
        whole_file = stream_of(opened, file.path)
        inner = decompressed(whole_file, compression, Allowance(whole_file))
        return _cut_archive(file, inner, part_bytes, MAX_ARCHIVE_PARTS), None
    nested = is_tar(head) or compression_of(head) is not None
    return (whole, None) if named or nested or format_of(head, file.source, inside=False) else ([], _unknown(file))


def _cut_archive(file: Input, stream: ByteStream, part_bytes: int, max_parts: int) -> list[Part]:
    """Consecutive members of an archive. The last part of a broken one goes on to wherever it breaks.

    A compressed archive is cut into at most `max_parts`; 1 stands for one that is not compressed.
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
    """Byte ranges of a plain file. A line belongs to the range its first byte is in."""
    count = max(1, -(-file.num_bytes // part_bytes))
    cuts = [file.num_bytes * i // count for i in range(count + 1)]
    return [_part(file, known, start, stop, stop - start, stop - start) for start, stop in pairwise(cuts)]


def _cut_parquet(file: Input, opened: BinaryIO, text_field: str, part_bytes: int) -> Cut:
    """Consecutive row groups; small ones together."""
    try:
        with pq.ParquetFile(opened) as table:
            metadata = table.metadata
            problem = column_problem(table.schema_arrow, text_field)
            paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    except TABLE_ERRORS:
        return [_part(file, "parquet", 0, END, file.num_bytes, file.num_bytes)], None
    if problem:
        return [], f"corpus.text_field = {text_field!r}: {file.path}: {problem}"
    column = paths.index(text_field)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    weights = [max(0, group.column(column).total_uncompressed_size) for group in groups]
    sizes = [max(0, group.total_byte_size) for group in groups]
    return _grouped(file, "parquet", weights, sizes, part_bytes), None


def _cut_arrow(file: Input, opened: BinaryIO, text_field: str, part_bytes: int) -> Cut:
    """Consecutive record batches of an Arrow file, as many in each part."""
    try:
        reader = pa.ipc.open_file(opened)
        problem = column_problem(reader.schema, text_field)
        count = reader.num_record_batches
    except TABLE_ERRORS:
        return [_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes)], None
    if problem:
        return [], f"corpus.text_field = {text_field!r}: {file.path}: {problem}"
    sizes = [file.num_bytes // max(1, count)] * count
    return _grouped(file, "arrow", sizes, sizes, part_bytes), None


def _grouped(file: Input, known: str, weights: list[int], sizes: list[int], part_bytes: int) -> list[Part]:
    """Parts of consecutive pieces (row groups, record batches) of together at least `part_bytes`, but for the last."""
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
