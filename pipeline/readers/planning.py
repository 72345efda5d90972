"""The files of a corpus and the parts they are cut into, from names, sizes, file heads and directories alone."""

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import BinaryIO, NamedTuple, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from declutr.common.console.logs import get_logger
from declutr.common.errors import missing_extra
from declutr.common.paths import expand
from declutr.common.stores.address import explained, is_remote
from declutr.pipeline.readers.archives import find_members, is_tar
from declutr.pipeline.readers.blobs import member_key
from declutr.pipeline.readers.corpus import (
    COMPRESSED_SUFFIXES,
    DOCUMENT_SUFFIXES,
    END,
    FIELD_FORMATS,
    JSON_SUFFIX,
    MIB,
    TAR_SUFFIX,
    Choice,
    FilesCorpus,
    HubCorpus,
    Input,
    OrderedFiles,
    Part,
    Rules,
    bare_suffix,
    missing,
    rules_of,
)
from declutr.pipeline.readers.files import Head
from declutr.pipeline.readers.inputs import find_inputs, hub_inputs
from declutr.pipeline.readers.lines import encoding_of, keys_of_lines
from declutr.pipeline.readers.rows import FieldRows, TextRows, column_problem, rows_of
from declutr.pipeline.readers.skipped import (
    EXCLUDED,
    SECOND,
    UNREADABLE,
    Skipped,
    advice_on,
    describe_skipped,
    left_by_programs,
)
from declutr.pipeline.readers.streams import (
    BLOCK_BYTES,
    READ_ERRORS,
    Allowance,
    ByteStream,
    StoreLostError,
    compression_of,
    decompressed,
    open_input,
    stream_of,
)
from declutr.pipeline.readers.tables import DELIMITERS, TABLE_ERRORS, header_problem

# Assumed ratio of English text to its compressed size, by which parts of compressed files are weighted.
COMPRESSION_RATIO = 3
MAX_ARCHIVE_PARTS = 64  # most parts of a compressed archive, because each part has to decompress everything before it
_THREADS = 32
_HEAD_BYTES = 4096
_PEEKED_BYTES = 1 << 14
_SHOWN_PROBLEMS = 20


class Cut(NamedTuple):
    """The parts and the problem of one file."""

    parts: list[Part]
    # Problem of the file. With parts, reading counts it as a failure; without parts, the corpus is refused.
    problem: str | None = None
    skipped: bool = False  # True if a search met the file and its format is unknown
    doubtful: bool = False  # True for a skipped .json with an object a line, which is read if a .json beside it is data


def _cut_archive(
    file: Input, stream: ByteStream, part_bytes: int, max_parts: int, key: Callable[[str], str] | None = None
) -> list[Part]:
    """Parts of consecutive members of an archive. The last part of a broken archive extends to the damage.

    A compressed archive is cut into at most `max_parts`; 1 means that it is not compressed.
    Consecutive members whose names have the same key stay together.
    """
    starts, end = find_members(stream, key)
    size = end or stream.position
    min_bytes = max(part_bytes, -(-size // max_parts)) if max_parts > 1 else part_bytes
    cuts = [0]
    for start in starts:
        if start - cuts[-1] >= min_bytes:
            cuts.append(start)
    stops = [*cuts[1:], end or END]
    shares = [file.num_bytes * cut // max(1, size) for cut in cuts[1:]]
    bounds = [0, *shares, file.num_bytes]
    if max_parts == 1:
        bounds = [*cuts, max(cuts[-1], file.num_bytes)]
    return [
        make_part(file, "tar", start, stop, high - low, min(stop, size) - start)
        for start, stop, (low, high) in zip(cuts, stops, pairwise(bounds), strict=True)
    ]


def _cut_ranges(file: Input, file_format: str, part_bytes: int) -> list[Part]:
    """Byte ranges of a plain file. A line belongs to the range of its first byte."""
    count = max(1, -(-file.num_bytes // part_bytes))  # rounded up: equal ranges, none above the size of a unit
    cuts = [file.num_bytes * i // count for i in range(count + 1)]
    return [make_part(file, file_format, start, stop, stop - start, stop - start) for start, stop in pairwise(cuts)]


def _cut_table(file: Input, opened: BinaryIO, file_format: str, rules: Rules, part_bytes: int) -> Cut:
    """Parts of consecutive row groups of a Parquet file, or of record batches of an Arrow file.

    If the rows have several values, the whole file is one part, because its pairs are grouped by premise.
    """
    rows, is_parquet = rows_of(rules), file_format == "parquet"
    whole = make_part(file, "parquet", 0, END, file.num_bytes, file.num_bytes) if is_parquet else _whole(file)
    try:
        if is_parquet:
            with pq.ParquetFile(opened) as table:
                schema, metadata = table.schema_arrow, table.metadata
            paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        else:
            reader = pa.ipc.open_file(opened)
            schema, count = reader.schema, reader.num_record_batches
        problem = rows.problem(schema)
    except TABLE_ERRORS:  # damage is counted when the file is read
        return Cut([whole])
    if isinstance(rows, FieldRows):
        return Cut([whole], problem and f"content: {file.path}: {problem}")
    if problem:
        return Cut([whole.model_copy(update={"weight": 0})], column_problem(file.path, rows, problem))
    if is_parquet:
        prefixes = tuple(f"{name}." for name in rows.names)
        columns = [n for n, path in enumerate(paths) if path in rows.names or path.startswith(prefixes)]
        # Of the text alone: a unit has about as much text whatever else a row has.
        weights = [sum(max(0, group.column(n).total_uncompressed_size) for n in columns) for group in groups]
        sizes = [max(0, group.total_byte_size) for group in groups]  # damaged numbers can be negative
    else:
        weights = sizes = [file.num_bytes // max(1, count)] * count
        part_bytes = END if is_remote(file.path) else part_bytes  # a part would fetch all before it, to count its rows
    return Cut(_grouped(file, file_format, weights, sizes, part_bytes))


def _grouped(file: Input, file_format: str, weights: list[int], sizes: list[int], part_bytes: int) -> list[Part]:
    """Parts of consecutive pieces (row groups, record batches), each except the last of at least `part_bytes`."""
    cuts = [0]
    group_weight = 0
    for number, weight in enumerate(weights, 1):
        group_weight += weight
        if group_weight >= part_bytes or number == len(weights):
            cuts.append(number)
            group_weight = 0
    total = max(1, sum(sizes))  # row groups can be empty
    return [
        make_part(
            file, file_format, start, stop, file.num_bytes * sum(sizes[start:stop]) // total, sum(weights[start:stop])
        )
        for start, stop in pairwise(cuts)
    ]


def make_part(file: Input, file_format: str, start: int, stop: int, num_bytes: int, weight: int) -> Part:
    """A part of a file; arguments as in `Part`."""
    values = {"format": file_format, "path": file.path, "source": file.source, "start": start, "stop": stop}
    return Part.model_validate(values | {"num_bytes": num_bytes, "weight": weight})


def _whole(file: Input, ratio: int = 1) -> Part:
    """The part of a file that is read forward, whose text has `ratio` times its size."""
    return make_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes * ratio)


def file_parts(
    corpus: FilesCorpus | HubCorpus, part_bytes: int, skipped: Skipped | None = None, rules: Rules | None = None
) -> tuple[list[Part], list[str]]:
    """Cuts the corpus into parts of about `part_bytes` bytes of text, in the order of names or of `OrderedFiles`.

    Counts the files that a search met and did not take in `skipped`. Also returns the problems of the inputs, one line
    each.
    """
    skipped = Skipped() if skipped is None else skipped
    rules = rules or rules_of(corpus)
    if isinstance(corpus, HubCorpus):
        inputs, problems = hub_inputs(corpus)
    else:
        inputs, problems = _corpus_files(corpus, skipped, rules)
    by_name = {file.path for file in inputs if not file.searched}  # stays named, whatever finds it too
    unique = dict[str, Input]()
    for file in sorted(inputs, key=lambda file: (file.entry, file.source, file.path)):
        if file.path in unique:
            skipped.add(SECOND, file.source)
        file = replace(file, searched=file.searched and file.path not in by_name)
        unique.setdefault(file.path, file)  # of a file and links to it, the first name counts
    sources = Counter(file.source for file in unique.values())
    files = [file if sources[file.source] == 1 else replace(file, source=file.path) for file in unique.values()]
    parts, failing, num_good = list[Part](), dict[str, list[str]](), 0
    cut_file = partial(_cut_file, rules=rules, part_bytes=part_bytes)
    # each head of a remote file is a request, and a request waits for the network
    with ThreadPoolExecutor(_THREADS if any(is_remote(file.path) for file in files) else 1) as pool:
        try:
            cuts = list(pool.map(cut_file, files))
        except StoreLostError as error:  # most likely of all files: said once
            return [], [*problems, f"corpus.paths: a file cannot be read: {error}"]
    of_data = {_place(file) for file, cut in zip(files, cuts, strict=True) if cut.parts and not cut.problem}
    for file, cut in zip(files, cuts, strict=True):
        if cut.doubtful and _place(file) in of_data:  # its first line lacks the key, others may have it
            cut = cut_file(replace(file, searched=False))
        parts += cut.parts
        num_good += bool(cut.parts) and cut.problem is None
        if cut.skipped:
            skipped.add_file(file.source)
        elif cut.problem:
            kind = cut.problem.replace(file.path, "")
            (failing.setdefault(kind, []) if cut.parts else problems).append(cut.problem)
        if file.lost or (cut.problem and cut.parts and cut.parts[0].format == "lost"):
            skipped.add(UNREADABLE, file.source)
    if failing and not num_good:  # nothing can be read, so most likely a setting is wrong
        for alike in [*failing.values()][:_SHOWN_PROBLEMS]:
            problems.append(alike[0] + (f" (files likewise: {len(alike):,})" if alike[1:] else ""))
    if not parts and files and not problems:  # tables without rows have no part beside others, but no wrong names
        parts = [_whole(file) for file, cut in zip(files, cuts, strict=True) if cut == Cut([])]
        names = " ".join(rules.suffixes)
        problems += [] if parts else [f"corpus.paths: no file found is named like {names}, or an archive of such files"]
    return parts, list(dict.fromkeys(problems))


def _place(file: Input) -> tuple[str, str]:
    """Folder and ending of a file."""
    return file.path.rpartition("/")[0], bare_suffix(file.source)


def _corpus_files(corpus: FilesCorpus, skipped: Skipped, rules: Rules) -> tuple[list[Input], list[str]]:
    """The files of all entries of `paths`, and their problems, one line each."""
    inputs, problems, idle = list[Input](), list[str](), corpus.exclude
    for number, entry in enumerate(corpus.paths):
        try:
            matches = list(find_inputs(entry, skipped))
        except OSError as error:
            problems.append(f"corpus.paths: {entry!r} cannot be listed: {explained(error)}")
            continue
        if not matches:
            place = None if is_remote(entry) else expand(entry)
            where = f"looked at {place.absolute()}" if place else "check the address, and that its server answers"
            where += ", a link to nothing" if place and place.is_symlink() else ""
            problems.append(f"corpus.paths: {entry!r} matches no file; {where}")
        idle = [pattern for pattern in idle if not any(f.searched and fnmatchcase(f.source, pattern) for f in matches)]
        usable: list[Input] = []
        for file in matches:
            if file.searched and any(fnmatchcase(file.source, pattern) for pattern in corpus.exclude):
                skipped.add(EXCLUDED, file.source)
            elif file.searched and (kind := left_by_programs(file.source)):
                skipped.add(kind, file.source)
            elif not file.searched or rules.format or _is_candidate(file, rules):
                usable.append(file)
            else:
                skipped.add_file(file.source)
        # File systems allow names of any bytes; Python reads those that are not UTF-8 as surrogates.
        unnamed = [f.path for f in usable if any("\ud800" <= letter <= "\udfff" for letter in f.source + f.path)]
        problems += [f"corpus.paths: the name {path!r} is not UTF-8; rename the file or folder" for path in unnamed]
        if matches and not usable:
            suffixes = " ".join(rules.suffixes)
            problems.append(
                f"corpus.paths: {entry!r} holds no file named like {suffixes} and no archive of such files"
                + "".join(f"; {line}" for line in describe_skipped(skipped.kinds()))
            )
        inputs += [replace(file, entry=number) for file in usable] if isinstance(corpus, OrderedFiles) else usable
    if idle:
        get_logger().warning("corpus.exclude: no file below a folder of corpus.paths matches %s", " or ".join(idle))
    return inputs, problems


def _is_candidate(file: Input, rules: Rules) -> bool:
    """Returns True if a file found in a folder may be readable, by its name or because it is compressed."""
    suffix = bare_suffix(file.source)
    if suffix in ("", JSON_SUFFIX) and not rules.blobs:  # their content decides
        return True
    if file.lost and (not suffix or os.path.isdir(file.path)):  # noqa: PTH112
        return True
    compressed = any(file.source.lower().endswith(ending) for ending in COMPRESSED_SUFFIXES)
    return suffix in rules.suffixes or suffix == TAR_SUFFIX or compressed


def _cut_file(file: Input, rules: Rules, part_bytes: int) -> Cut:
    """The parts of one file, or its problem. Damage inside the file is found when it is read."""
    if file.lost:
        return _lost(file, "it cannot be read")
    try:
        with open_input(file.path) as opened:
            beginning = ByteStream(opened.read, 0, _PEEKED_BYTES)
            beginning.peek(1)  # raises the error of a file that cannot be read
            head = Head.of(beginning, file.source, _HEAD_BYTES)
            compression = compression_of(head.data)
            if compression:
                return _cut_compressed(file, opened, compression, rules, part_bytes)
            if is_tar(head.data) or (rules.format is None and head.suffix == TAR_SUFFIX):
                stream = stream_of(opened, file.path)
                if not is_remote(file.path):  # seek from header to header; for remote files plain reading is faster
                    stream = ByteStream(opened.read, 0, BLOCK_BYTES, opened.seek)
                return Cut(_cut_archive(file, stream, part_bytes, 1, member_key if rules.blobs else None))
            file_format = head.format(rules, inside=False)
            if file_format is None or not _is_data(head, file, rules):
                return _unknown(file, rules, head)
            if rules.keys and (refusal := _refused(file, file_format, rules)):
                return refusal
            if file_format == "parquet" or (file_format == "arrow" and head.data.startswith(b"ARROW1")):
                return _cut_table(file, opened, file_format, rules, part_bytes)
            if file_format in ("jsonl", "text") and rules.max_file_bytes is None and encoding_of(head.data) is None:
                has_key = rules.keys or file_format == "text" or is_remote(file.path) or head.has_key(rules, cut=False)
                keys = [] if has_key else keys_of_lines(opened, file.num_bytes)
                problem = missing(rules.text_names, keys, "key") if keys else None
                ranges = _cut_ranges(file, file_format, part_bytes)
                return Cut(ranges, problem and column_problem(file.path, TextRows(rules), problem))
            delimiter = None if rules.keys else DELIMITERS.get(file_format)
            if delimiter and (problem := header_problem(head.data, rules, delimiter)):
                return Cut([_whole(file, 0)], column_problem(file.path, TextRows(rules), problem))
            return Cut([_whole(file)])
    except OSError as error:
        if file.searched and not is_remote(file.path):
            return _lost(file, str(error))
        return Cut([], f"corpus.paths: {file.path} cannot be read: {explained(error)}")


def _refused(file: Input, file_format: str, rules: Rules) -> Cut | None:
    """The problem of a file whose rows have several values: it has none, or it is too large.

    A file is one part if its size is limited: then its rows belong together, such as the pairs of a premise.
    """
    if file_format not in FIELD_FORMATS:
        if file.searched:
            return Cut([], skipped=True)
        formats = ", ".join(FIELD_FORMATS)
        return Cut([], f"corpus.paths: {file.path} is {file_format}; pairs and triples are read from {formats}")
    if rules.max_file_bytes is not None and file.num_bytes > rules.max_file_bytes:
        return Cut(
            [],
            f"corpus.paths: {file.path} has {file.num_bytes / MIB:,.0f} MiB, at most {rules.max_file_bytes / MIB:,.0f} "
            "MiB are possible, because the pairs of a file are held in memory; split it into files with different "
            "premises",
        )
    return None


def _lost(file: Input, why: str) -> Cut:
    """A part that gives one failure, and a problem in case no other file can be read."""
    return Cut([make_part(file, "lost", 0, 0, 0, 0)], f"corpus.paths: {file.path} cannot be read: {why}")


def _unknown(file: Input, rules: Rules, head: Head) -> Cut:
    """The problem of an explicitly named file of unknown format; a file met by a search is skipped."""
    if file.searched:
        return Cut([], skipped=True, doubtful=head.suffix == JSON_SUFFIX and head.is_object())
    problem = missing_extra("documents", f"corpus.paths: {file.path!r}")
    if rules.blobs:
        endings = " ".join(rules.suffixes)
        problem = f"corpus.paths: {file.path!r}: {rules.blobs.kind} are read from {endings} and from archives of them"
    elif problem is None or rules.keys or bare_suffix(file.source) not in DOCUMENT_SUFFIXES:
        is_text = b"\0" not in head.data or encoding_of(head.data) is not None
        remedy = f"; set corpus.format to {', '.join(get_args(Choice)[2:])}"
        remedy = remedy if is_text else ", and its bytes are no text; name files with texts"
        problem = f"corpus.paths: the format of {file.path!r} is unknown{remedy}{advice_on(file.source)}"
    return Cut([], problem)


def _cut_compressed(file: Input, opened: BinaryIO, compression: str, rules: Rules, part_bytes: int) -> Cut:
    """The parts of a compressed file: one, unless it is an archive larger than a part."""
    weight = file.num_bytes * COMPRESSION_RATIO
    whole = Cut([_whole(file, COMPRESSION_RATIO)])
    suffix = bare_suffix(file.source)
    is_expected = rules.format is not None or suffix in rules.suffixes or suffix == TAR_SUFFIX
    if is_expected and weight <= part_bytes:
        return whole
    opened.seek(0)
    beginning = ByteStream(opened.read, 0, _PEEKED_BYTES)
    try:
        stream = decompressed(beginning, compression, Allowance(beginning), BLOCK_BYTES)
        stream.peek(BLOCK_BYTES)
    except READ_ERRORS:
        return whole
    head = Head.of(stream, file.source)
    if is_tar(head.data) and weight > part_bytes:
        packed = stream_of(opened, file.path)
        inner = decompressed(packed, compression, Allowance(packed))
        return Cut(_cut_archive(file, inner, part_bytes, MAX_ARCHIVE_PARTS, member_key if rules.blobs else None))
    nested = is_tar(head.data) or compression_of(head.data) is not None
    if is_expected or nested or (head.format(rules, inside=False) is not None and _is_data(head, file, rules)):
        return whole
    return _unknown(file, rules, head)


def _is_data(head: Head, file: Input, rules: Rules) -> bool:
    """Returns False for a .json that a search met, if its first object has no key that is read."""
    is_expected = not file.searched or rules.format is not None or rules.blobs is not None
    return is_expected or head.suffix != JSON_SUFFIX or head.has_key(rules)
