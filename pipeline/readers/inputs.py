"""The files of a corpus, found by their names alone."""

import os

from common.paths import expand
from common.stores.address import is_remote
from pipeline.readers.corpus import FilesCorpus, Input
from pipeline.readers.names import SUFFIXES, TAR_SUFFIX, bare_suffix
from pipeline.readers.places import find_inputs
from pipeline.readers.skipped import Skipped, describe_skipped
from pipeline.readers.streams import COMPRESSED_SUFFIXES


def corpus_files(corpus: FilesCorpus, skipped: Skipped) -> tuple[list[Input], list[str]]:
    """The files of all entries of `paths`, and their problems, one line each."""
    found: list[Input] = []
    problems: list[str] = []
    for given in corpus.paths:
        try:
            matches = list(find_inputs(given, skipped))
        except OSError as error:
            problems.append(f"corpus.paths: {given!r} cannot be listed: {error}")
            continue
        if not matches:
            where = given if is_remote(given) else expand(given).absolute()
            problems.append(f"corpus.paths: {given!r} matches no file; looked at {where}")
        usable: list[Input] = []
        for file in matches:
            if not file.searched or corpus.format != "auto" or _is_candidate(file):
                usable.append(file)
            else:
                skipped.add_file(file.source)
        unnamed = [file for file in usable if not _is_unicode(file.source)]
        problems += [f"corpus.paths: the name {file.path!r} is not UTF-8; rename the file" for file in unnamed]
        if matches and not usable:
            problems.append(
                f"corpus.paths: {given!r} holds no file named like {' '.join(SUFFIXES)} and no archive of such files"
                + "".join(f"; {line}" for line in describe_skipped(skipped.kinds()))
            )
        found += usable
    return found, problems


def _is_unicode(name: str) -> bool:
    """Returns True if a name is valid Unicode; file systems allow any bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _is_candidate(file: Input) -> bool:
    """Returns True if a file found in a folder may be readable, by its name or because it is compressed."""
    suffix = bare_suffix(file.source)
    if file.lost and (not suffix or os.path.isdir(file.path)):  # noqa: PTH112
        return True
    compressed = any(file.source.lower().endswith(ending) for ending in COMPRESSED_SUFFIXES)
    return suffix in SUFFIXES or suffix == TAR_SUFFIX or compressed
