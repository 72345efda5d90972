"""The files of a corpus and the parts they are cut into, from names, sizes, file heads and directories alone.

Data files of one split of a Hugging Face Hub dataset at one commit. Scripts of the dataset are never run.
"""

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from declutr.common.hub import hub_problem
from declutr.common.paths import expand
from declutr.common.stores.address import explained, is_remote, network_errors
from declutr.pipeline.readers.archives import is_tar
from declutr.pipeline.readers.blobs import member_key
from declutr.pipeline.readers.corpus import END, MIB, FilesCorpus, HubCorpus, Input, Part
from declutr.pipeline.readers.delimited import DELIMITERS
from declutr.pipeline.readers.fields import FIELD_FORMATS, fields_problem
from declutr.pipeline.readers.files import Rules, format_of, is_json_lines, rules_of
from declutr.pipeline.readers.inputs import find_inputs, open_input, stream_of
from declutr.pipeline.readers.names import JSON_SUFFIX, MARKDOWN, SUFFIXES, TAR_SUFFIX, bare_suffix
from declutr.pipeline.readers.parts import (
    Cut,
    cut_archive,
    cut_arrow,
    cut_delimited,
    cut_parquet,
    cut_ranges,
    make_part,
)
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

_CONVERTED = "refs/convert/parquet"
"""Branch with the Hub's Parquet copies of datasets in other formats: CONFIG/SPLIT/0000.parquet."""
_DATA = {*SUFFIXES, JSON_SUFFIX, TAR_SUFFIX} - MARKDOWN
"""Suffixes of data files; Markdown on the Hub only describes a dataset."""
_SPLIT = re.compile(r"(?<![a-z])(train|training|test|testing|validation|valid|val|dev|eval|evaluation)(?![a-z])")
_SAME_SPLIT = {"training": "train", "testing": "test", "valid": "validation", "val": "validation", "dev": "validation"}

Files = dict[str, int]


def hub_inputs(corpus: HubCorpus) -> tuple[list[Input], list[str]]:
    """The files of the split with their sizes, and problems, one line each."""
    if unreached := hub_problem():
        return [], [f"corpus.name = {corpus.name!r}: the Hub does not give the dataset: {unreached}"]
    try:
        with network_errors():
            commit, files, card = _listing(corpus.name, corpus.revision)
            chosen, problem = _choose(corpus, files, card)
            if not chosen and not problem and corpus.revision is not None:
                problem = (
                    f"corpus.revision = {corpus.revision!r}: {corpus.name} has no data files of the split "
                    f"{corpus.split!r} there, and the Hub's Parquet copies are of its main branch; remove the revision"
                )
            elif not chosen and not problem:
                commit, files, _ = _listing(corpus.name, _CONVERTED)
                chosen, problem = _converted(corpus, files)
    except OSError as error:
        return [], [f"corpus.name = {corpus.name!r}: the Hub does not give the dataset: {error}"]
    if problem:
        return [], [problem]
    # The commit is part of the source, so that a changed dataset counts as another input.
    return [
        Input(
            f"hf://datasets/{corpus.name}@{commit}/{name}", f"{corpus.name}@{commit[:12]}/{name}", size, searched=False
        )
        for name, size in sorted(chosen.items())
    ], []


def _listing(name: str, revision: str | None) -> tuple[str, Files, dict[str, Any]]:
    """Commit, files with their sizes, and the head of the README."""
    from huggingface_hub import HfApi  # imported here because it takes a second

    info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    card = dict(info.card_data.__dict__) if info.card_data else {}
    return str(info.sha), files, card


def _choose(corpus: HubCorpus, files: Files, card: dict[str, Any]) -> tuple[Files, str | None]:
    """The data files of the split, as declared in the README or else by their names; or a problem."""
    data = {name: size for name, size in files.items() if bare_suffix(name) in _DATA and not name.startswith(".")}
    configs = card.get("configs")
    if isinstance(configs, list) and configs:
        return _declared(corpus, data, configs)
    if corpus.config is not None:
        data = {name: size for name, size in data.items() if corpus.config in name.split("/")[:-1]}
    splits = {name: _split_of(name) for name in data}
    if not any(splits.values()):
        return (data, None) if corpus.split == "train" else ({}, None)
    split = _SAME_SPLIT.get(corpus.split, corpus.split)
    return {name: size for name, size in data.items() if splits[name] == split}, None


def _split_of(name: str) -> str | None:
    """The split in a file's name or in the name of one of its folders."""
    for part in reversed(name.lower().split("/")):
        if match := _SPLIT.search(part):
            return _SAME_SPLIT.get(match[1], match[1])
    return None


def _declared(corpus: HubCorpus, data: Files, configs: list[Any]) -> tuple[Files, str | None]:
    """The files that the README declares for the configuration and the split."""
    by_name = {str(config.get("config_name", "default")): config for config in configs if isinstance(config, dict)}
    defaults = [name for name, config in by_name.items() if config.get("default")]
    names = [corpus.config] if corpus.config else (defaults or [n for n in by_name if n == "default"] or list(by_name))
    if len(names) != 1 or names[0] not in by_name:
        return {}, f"corpus.config = {corpus.config!r}: {corpus.name} has the configurations {sorted(by_name)}"
    config = by_name[names[0]]
    patterns: dict[str, list[str]] = {}
    declared = config.get("data_files", [])
    for entry in declared if isinstance(declared, list) else [declared]:
        if isinstance(entry, dict) and "path" in entry:
            paths = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
            patterns.setdefault(str(entry.get("split", "train")), []).extend(map(str, paths))
        elif isinstance(entry, str):
            patterns.setdefault("train", []).append(entry)
    if not patterns:  # only a folder: file names decide the splits
        folder = str(config.get("data_dir", "")).strip("./")
        inside = {name: size for name, size in data.items() if not folder or name.startswith(f"{folder}/")}
        return _choose(corpus.model_copy(update={"config": None}), inside, {})
    if corpus.split not in patterns:
        return {}, f"corpus.split = {corpus.split!r}: {corpus.name} ({names[0]}) has the splits {sorted(patterns)}"
    regexes = [re.compile(fnmatch.translate(pattern.removeprefix("./"))) for pattern in patterns[corpus.split]]
    return {name: size for name, size in data.items() if any(test.match(name) for test in regexes)}, None


def _converted(corpus: HubCorpus, files: Files) -> tuple[Files, str | None]:
    """The files of the split on the branch of Parquet copies."""
    layout = [(name.split("/"), size) for name, size in files.items() if name.endswith(".parquet")]
    layout = [(parts, size) for parts, size in layout if len(parts) == 3]
    configs = sorted({parts[0] for parts, _ in layout})
    config = corpus.config or ("default" if "default" in configs else configs[0] if len(configs) == 1 else None)
    if config not in configs:
        return {}, f"corpus.config = {corpus.config!r}: {corpus.name} has the configurations {configs}"
    splits = sorted({parts[1].removeprefix("partial-") for parts, _ in layout if parts[0] == config})
    if corpus.split not in splits:
        return {}, f"corpus.split = {corpus.split!r}: {corpus.name} ({config}) has the splits {splits}"
    kept = {
        "/".join(parts): size
        for parts, size in layout
        if parts[0] == config and parts[1].removeprefix("partial-") == corpus.split
    }
    return kept, None


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
        inputs, problems = hub_inputs(corpus)
    else:
        inputs, problems = _corpus_files(corpus, skipped, rules)
    unique = dict[str, Input]()
    for file in sorted(inputs, key=lambda file: file.source):  # of a file and links to it, the first name counts
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
    inputs: list[Input] = []
    problems: list[str] = []
    for entry in corpus.paths:
        try:
            matches = list(find_inputs(entry, skipped))
        except OSError as error:
            problems.append(f"corpus.paths: {entry!r} cannot be listed: {explained(error)}")
            continue
        if not matches:
            where = entry if is_remote(entry) else expand(entry).absolute()
            problems.append(f"corpus.paths: {entry!r} matches no file; looked at {where}")
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
            suffixes = " ".join(rules.suffixes)
            problems.append(
                f"corpus.paths: {entry!r} holds no file named like {suffixes} and no archive of such files"
                + "".join(f"; {line}" for line in describe_skipped(skipped.kinds()))
            )
        inputs += usable
    return inputs, problems


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
            file_format = format_of(head, file.source, rules, inside=False)
            if file_format is None or (file.searched and not _is_data(head, file, rules)):
                return _unknown(file, rules)
            if rules.blobs and file_format == "parquet":
                return cut_parquet(file, opened, (rules.blobs.column,), part_bytes, rules.blobs.setting)
            if rules.keys:
                return _cut_fields(file, opened, head, file_format, rules, part_bytes)
            if file_format in ("jsonl", "text") and encoding_of(head) is None:
                return Cut(cut_ranges(file, file_format, part_bytes))
            if file_format == "parquet":
                return cut_parquet(file, opened, rules.text_names, part_bytes)
            if file_format == "arrow" and head.startswith(b"ARROW1"):
                return cut_arrow(file, opened, rules.text_names, part_bytes)
            if file_format in DELIMITERS:
                return cut_delimited(file, head, file_format, rules.text_names)
            return Cut([make_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes)])
    except OSError as error:
        if file.searched and not is_remote(file.path):
            return _lost(file, str(error))
        return Cut([], f"corpus.paths: {file.path} cannot be read: {explained(error)}")


def _cut_fields(file: Input, opened: BinaryIO, head: bytes, file_format: str, rules: Rules, part_bytes: int) -> Cut:
    """The part of a file whose rows have several values. A file is one part if its size is limited.

    Then its rows belong together, such as the pairs of a premise.
    """
    if file_format not in FIELD_FORMATS:
        if file.searched:
            return Cut([], skipped=True)
        return Cut(
            [],
            f"corpus.paths: {file.path} is {file_format}; pairs and triples are read from {', '.join(FIELD_FORMATS)}",
        )
    if rules.max_file_bytes is not None and file.num_bytes > rules.max_file_bytes:
        return Cut(
            [],
            f"corpus.paths: {file.path} has {file.num_bytes / MIB:,.0f} MiB, at most {rules.max_file_bytes / MIB:,.0f} "
            "MiB are possible, because the pairs of a file are held in memory; split it into files with different "
            "premises",
        )
    if file_format == "parquet":
        part = make_part(file, "parquet", 0, END, file.num_bytes, file.num_bytes)
        try:
            with pq.ParquetFile(opened) as table:
                problem = fields_problem(table.schema_arrow, rules.keys)
        except TABLE_ERRORS:
            problem = None  # damage is found when the file is read
        return Cut([part], problem and f"content: {file.path}: {problem}")
    if file_format == "jsonl" and rules.max_file_bytes is None and encoding_of(head) is None:
        return Cut(cut_ranges(file, file_format, part_bytes))
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
    is_expected = rules.format is not None or suffix in rules.suffixes or suffix == TAR_SUFFIX
    if is_expected and weight <= part_bytes:
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
    is_data = format_of(head, file.source, rules, inside=False) is not None and _is_data(head, file, rules)
    return Cut(whole) if is_expected or nested or is_data else _unknown(file, rules)


def _is_data(head: bytes, file: Input, rules: Rules) -> bool:
    """Returns False for a .json that a search met, if its first line is no object with a key that is read."""
    is_expected = not file.searched or rules.format is not None or rules.blobs is not None
    return is_expected or bare_suffix(file.source) != JSON_SUFFIX or is_json_lines(head, rules)
