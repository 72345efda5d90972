"""The files of a corpus and the parts they are cut into, from names, sizes, file heads and directories alone."""

import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import BinaryIO

import pyarrow.parquet as pq

from declutr.common.paths import expand
from declutr.common.stores.address import is_remote
from declutr.common.stores.retry import explained
from declutr.pipeline.readers.archives import is_tar
from declutr.pipeline.readers.blobs import member_key
from declutr.pipeline.readers.corpus import END, MIB, FilesCorpus, HubCorpus, Input, Part
from declutr.pipeline.readers.cuts import Cut, cut_archive, cut_arrow, cut_delimited, cut_parquet, cut_ranges, make_part
from declutr.pipeline.readers.delimited import DELIMITERS
from declutr.pipeline.readers.fields import FIELD_FORMATS, fields_problem
from declutr.pipeline.readers.files import Rules, format_of, is_json_lines, rules_of
from declutr.pipeline.readers.hub import hub_inputs
from declutr.pipeline.readers.inputs import find_inputs, open_input, stream_of
from declutr.pipeline.readers.names import JSON_SUFFIX, TAR_SUFFIX, bare_suffix
from declutr.pipeline.readers.plain_text import encoding_of
from declutr.pipeline.readers.skipped import EXCLUDED, UNREADABLE, Skipped, advice_on, describe_skipped
from declutr.pipeline.readers.streams import (
    BLOCK_BYTES,
    COMPRESSED_SUFFIXES,
    READ_ERRORS,
    Allowance,
    ByteStream,
    compression_of,
    decompressed,
)
from declutr.pipeline.readers.tables import TABLE_ERRORS

COMPRESSION_RATIO = 3
"""Assumed ratio of English text to its compressed size, by which parts of compressed files are weighted."""
MAX_ARCHIVE_PARTS = 64
"""Most parts of a compressed archive, because each part has to decompress everything before it."""
_THREADS = 32
_HEAD_BYTES = 4096
_PEEKED_BYTES = 1 << 14
_SHOWN_PROBLEMS = 20


def file_parts(
    corpus: FilesCorpus | HubCorpus, part_bytes: int, skipped: Skipped | None = None, rules: Rules | None = None
) -> tuple[list[Part], list[str]]:
    """Cuts the corpus into parts of about `part_bytes` bytes of text, in an order that depends only on names.

    Counts the files that a search met and did not take in `skipped`. Also returns the problems of the inputs, one line
    each.
    """
    skipped = Skipped() if skipped is None else skipped
    rules = rules or rules_of(corpus)
    if isinstance(corpus, HubCorpus):
        found, problems = hub_inputs(corpus)
    else:
        found, problems = _corpus_files(corpus, skipped, rules)
    unique = dict[str, Input]()
    for file in sorted(found, key=lambda file: file.source):  # of a file and links to it, the first name counts
        unique.setdefault(file.path, file)
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
            f"corpus.paths: no file found is named like {' '.join(rules.suffixes)} or is an archive of such files"
        )
    return parts, list(dict.fromkeys(problems))


def _corpus_files(corpus: FilesCorpus, skipped: Skipped, rules: Rules) -> tuple[list[Input], list[str]]:
    """The files of all entries of `paths`, and their problems, one line each."""
    found: list[Input] = []
    problems: list[str] = []
    for given in corpus.paths:
        try:
            matches = list(find_inputs(given, skipped))
        except OSError as error:
            problems.append(f"corpus.paths: {given!r} cannot be listed: {explained(error)}")
            continue
        if not matches:
            where = given if is_remote(given) else expand(given).absolute()
            problems.append(f"corpus.paths: {given!r} matches no file; looked at {where}")
        usable: list[Input] = []
        for file in matches:
            if file.searched and any(fnmatchcase(file.source, pattern) for pattern in corpus.exclude):
                skipped.add(EXCLUDED, file.source)
            elif not file.searched or corpus.format != "auto" or _is_candidate(file, rules):
                usable.append(file)
            else:
                skipped.add_file(file.source)
        unnamed = [file for file in usable if not _is_unicode(file.source)]
        problems += [f"corpus.paths: the name {file.path!r} is not UTF-8; rename the file" for file in unnamed]
        if matches and not usable:
            named = " ".join(rules.suffixes)
            problems.append(
                f"corpus.paths: {given!r} holds no file named like {named} and no archive of such files"
                + "".join(f"; {line}" for line in describe_skipped(skipped.kinds()))
            )
        found += usable
    return found, problems


def _is_unicode(name: str) -> bool:
    """Returns True if a name is valid Unicode; file systems allow any bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _is_candidate(file: Input, rules: Rules) -> bool:
    """Returns True if a file found in a folder may be readable, by its name or because it is compressed."""
    suffix = bare_suffix(file.source)
    if suffix in ("", JSON_SUFFIX) and not rules.blobs:  # their content decides
        return True
    if file.lost and (not suffix or os.path.isdir(file.path)):  # noqa: PTH112
        return True
    compressed = any(file.source.lower().endswith(ending) for ending in COMPRESSED_SUFFIXES)
    return suffix in rules.suffixes or suffix == TAR_SUFFIX or compressed


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
                return Cut(cut_archive(file, stream, part_bytes, 1, member_key if rules.blobs else None))
            known = format_of(head, file.source, rules, inside=False)
            if known is None or (file.searched and not _is_data(head, file, rules)):
                return _unknown(file, rules)
            if rules.blobs and known == "parquet":
                return cut_parquet(file, opened, (rules.blobs.column,), part_bytes, rules.blobs.setting)
            if rules.keys:
                return _cut_fields(file, opened, head, known, rules, part_bytes)
            if known in ("jsonl", "text") and encoding_of(head) is None:
                return Cut(cut_ranges(file, known, part_bytes))
            if known == "parquet":
                return cut_parquet(file, opened, rules.text_names, part_bytes)
            if known == "arrow" and head.startswith(b"ARROW1"):
                return cut_arrow(file, opened, rules.text_names, part_bytes)
            if known in DELIMITERS:
                return cut_delimited(file, head, known, rules.text_names)
            return Cut([make_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes)])
    except OSError as error:
        if file.searched and not is_remote(file.path):
            return _lost(file, str(error))
        return Cut([], f"corpus.paths: {file.path} cannot be read: {explained(error)}")


def _cut_fields(file: Input, opened: BinaryIO, head: bytes, known: str, rules: Rules, part_bytes: int) -> Cut:
    """The part of a file whose rows have several values. A file is one part if its size is limited.

    Then its rows belong together, such as the pairs of a premise.
    """
    if known not in FIELD_FORMATS:
        if file.searched:
            return Cut([], skipped=True)
        return Cut(
            [], f"corpus.paths: {file.path} is {known}; pairs and triples are read from {', '.join(FIELD_FORMATS)}"
        )
    if rules.max_file_bytes is not None and file.num_bytes > rules.max_file_bytes:
        return Cut(
            [],
            f"corpus.paths: {file.path} has {file.num_bytes / MIB:,.0f} MiB, at most {rules.max_file_bytes / MIB:,.0f} "
            "MiB are possible, because the pairs of a file are held in memory; split it into files with different "
            "premises",
        )
    if known == "parquet":
        part = make_part(file, "parquet", 0, END, file.num_bytes, file.num_bytes)
        try:
            with pq.ParquetFile(opened) as table:
                problem = fields_problem(table.schema_arrow, rules.keys)
        except TABLE_ERRORS:
            problem = None  # damage is found when the file is read
        return Cut([part], problem and f"content: {file.path}: {problem}")
    if known == "jsonl" and rules.max_file_bytes is None and encoding_of(head) is None:
        return Cut(cut_ranges(file, known, part_bytes))
    return Cut([make_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes)])


def _lost(file: Input, why: str) -> Cut:
    """A part that gives one failure, and a problem in case no other file can be read."""
    return Cut([make_part(file, "lost", 0, 0, 0, 0)], f"corpus.paths: {file.path} cannot be read: {why}")


def _unknown(file: Input, rules: Rules) -> Cut:
    """The problem of an explicitly named file of unknown format; a file met by a search is skipped."""
    if file.searched:
        return Cut([], skipped=True)
    if rules.blobs:
        endings = " ".join(rules.suffixes)
        return Cut(
            [], f"corpus.paths: {file.path!r}: {rules.blobs.kind} are read from {endings} and from archives of them"
        )
    return Cut(
        [],
        f"corpus.paths: the format of {file.path!r} is unknown; set corpus.format to jsonl, text, "
        f"text_file, parquet, arrow, csv or tsv{advice_on(file.source)}",
    )


def _cut_compressed(file: Input, opened: BinaryIO, compression: str, rules: Rules, part_bytes: int) -> Cut:
    """The parts of a compressed file: one, unless it is an archive larger than a part."""
    weight = file.num_bytes * COMPRESSION_RATIO
    whole = [make_part(file, "stream", 0, file.num_bytes, file.num_bytes, weight)]
    suffix = bare_suffix(file.source)
    named = rules.format is not None or suffix in rules.suffixes or suffix == TAR_SUFFIX
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
        key = member_key if rules.blobs else None
        return Cut(cut_archive(file, inner, part_bytes, MAX_ARCHIVE_PARTS, key))
    nested = is_tar(head) or compression_of(head) is not None
    known = format_of(head, file.source, rules, inside=False) is not None and _is_data(head, file, rules)
    return Cut(whole) if named or nested or known else _unknown(file, rules)


def _is_data(head: bytes, file: Input, rules: Rules) -> bool:
    """Returns False for a .json that a search met, if its first line is no object with a key that is read."""
    named = not file.searched or rules.format is not None or rules.blobs is not None
    return named or bare_suffix(file.source) != JSON_SUFFIX or is_json_lines(head, rules)
