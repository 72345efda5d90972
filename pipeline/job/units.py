"""Units of work, each read by one task. They depend only on the inputs and the configuration, not on the workers."""

import math
from collections.abc import Iterator, Sequence

from pydantic import Field

from declutr.common.config import Strict
from declutr.common.storage import hash_json
from declutr.pipeline.media.media_rows import blob_rules, media_rows
from declutr.pipeline.readers.corpus import MIB, UNIT_MIB, FilesCorpus, HubCorpus, Part, Record, Rules, rules_of
from declutr.pipeline.readers.files import Meter, read_part
from declutr.pipeline.readers.input_state import FileState, InputState, digest_parts, input_state_of, read_file_states
from declutr.pipeline.readers.planning import file_parts
from declutr.pipeline.readers.pydocs import PythonDocs, python_parts, read_python
from declutr.pipeline.readers.skipped import Skipped
from declutr.pipeline.readers.streams import StoreLostError
from declutr.pipeline.shards.content import AnyContent, AudioContent, DocumentsContent, ImagesContent, keys_of
from declutr.pipeline.texts import MAX_FILE_BYTES, rows

Corpus = FilesCorpus | HubCorpus | PythonDocs
DOCUMENTS = DocumentsContent()
MOST_UNITS = 65_536


class Unit(Strict):
    """Parts of the corpus that one task reads in order and writes to the shards named after the unit."""

    name: str
    """The unit's place in the plan, five or more digits."""
    parts: list[Part]
    file_states: dict[str, FileState | None] = Field(default_factory=dict)
    """State of its files when the plan was made, by path; empty without a call of `with_file_states`."""

    @property
    def input_state(self) -> InputState | None:
        """State of its inputs when the plan was made."""
        return input_state_of(self.parts, self.file_states) if self.file_states else None

    @property
    def num_bytes(self) -> int:
        """Input bytes."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def weight(self) -> int:
        """Approximate bytes of text."""
        return sum(part.weight for part in self.parts)


class UnitReader(Iterator[Record]):
    """Every document and failure of a unit, in order, and the input bytes read for them so far."""

    def __init__(self, unit: Unit, corpus: Corpus, content: AnyContent) -> None:
        self._done = self._part_bytes = self._max_bytes_read = 0
        self._meter = Meter()
        records = self._read(unit, None if isinstance(corpus, PythonDocs) else _rules(corpus, content))
        if isinstance(content, ImagesContent | AudioContent):
            self._records = media_rows(records, content)
        else:
            self._records = records if content.kind == "documents" else rows(records, content)

    def __iter__(self) -> "UnitReader":
        return self

    def __next__(self) -> Record:
        try:
            return next(self._records)
        except StoreLostError as error:  # what it still has is not lost, so this is no failure to count
            raise OSError(str(error)) from error

    @property
    def bytes_read(self) -> int:
        """Input bytes (compressed if the input is) from 0 to the unit's `num_bytes`, slightly ahead of the records."""
        now = self._done + min(self._part_bytes, max(0, int(self._meter.measure())))
        self._max_bytes_read = max(self._max_bytes_read, now)
        return self._max_bytes_read

    def _read(self, unit: Unit, rules: Rules | None) -> Iterator[Record]:
        for part in unit.parts:
            self._meter, self._part_bytes = Meter(), part.num_bytes
            yield from read_python(part) if rules is None else read_part(part, rules, self._meter)
            self._meter, self._part_bytes = Meter(), 0
            self._done += part.num_bytes


def _rules(corpus: FilesCorpus | HubCorpus, content: AnyContent) -> Rules:
    """Rules for reading the files of a corpus with this content."""
    if content.kind == "documents":
        return rules_of(corpus)
    max_file_bytes = MAX_FILE_BYTES if content.kind == "pairs" else None
    return rules_of(corpus, keys_of(content), max_file_bytes, blob_rules(content))


def plan_units(
    corpus: Corpus, unit_mib: float | None, skipped: Skipped | None = None, content: AnyContent = DOCUMENTS
) -> tuple[list[Unit], list[str]]:
    """Groups the corpus into units of about `unit_mib` MiB of uncompressed text, or UNIT_MIB; see `file_parts`."""
    unit_bytes = max(1, int((unit_mib or UNIT_MIB) * MIB))
    parts, problems = (
        (python_parts(), list[str]())
        if isinstance(corpus, PythonDocs)
        else file_parts(corpus, unit_bytes, skipped, _rules(corpus, content))
    )
    groups: list[list[Part]] = []
    group_bytes = 0
    for part in parts:
        if not groups or group_bytes + part.weight > unit_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(part)
        group_bytes += part.weight
    return [Unit(name=f"{index:05d}", parts=group) for index, group in enumerate(groups)], problems


def fit_units(
    corpus: Corpus,
    unit_mib: float | None,
    skipped: Skipped | None = None,
    content: AnyContent = DOCUMENTS,
    least_mib: float = UNIT_MIB,
    most_units: int = MOST_UNITS,
) -> tuple[float, list[Unit], list[str]]:
    """The size of units in MiB, the units, and the problems of the inputs.

    Without a given size, units have `least_mib`, and more if there would be over `most_units` of them. The manifest has
    an entry for each shard of a unit, which every worker of a run reads, so their number must not grow with the corpus.
    """
    chosen = unit_mib or least_mib
    units, problems = plan_units(corpus, chosen, skipped, content)
    if unit_mib is None and len(units) > most_units:
        chosen = math.ceil(sum(unit.weight for unit in units) / MIB / most_units)
        units, problems = plan_units(corpus, chosen, None, content)  # what is skipped is counted already
    return float(chosen), units, problems


def hash_unit(unit: Unit) -> str:
    """SHA-256 of a unit's parts, by name and size but not by path."""
    return hash_json([part.model_dump(exclude={"path"}) for part in unit.parts])


def with_file_states(units: Sequence[Unit]) -> list[Unit]:
    """The units with the states of their files; each file is examined once."""
    states = read_file_states(part for unit in units for part in unit.parts)
    return [
        unit.model_copy(update={"file_states": {part.path: states[part.path] for part in unit.parts}}) for unit in units
    ]


def input_state_read(unit: Unit) -> InputState | None:
    """The input state of a unit that was just read; None if `with_file_states` has not recorded the state of its files.

    Raises:
        OSError: a file was changed after planning. (A missing file is already counted as a failure.)
    """
    if not unit.file_states:
        return None
    digest = digest_parts(unit.parts)
    check_unchanged(unit)
    return input_state_of(unit.parts, unit.file_states, digest)


def check_unchanged(unit: Unit) -> None:
    """Check that the files of a unit are as when it was planned by `with_file_states`.

    Raises:
        OSError: a file was changed after planning. (A missing file is already counted as a failure.)
    """
    now = read_file_states(unit.parts)
    for part in unit.parts:
        if now[part.path] is not None and now[part.path] != unit.file_states[part.path]:
            raise OSError(f"{part.source} was changed while the corpus was being read; do not modify inputs meanwhile")


def read_unit(unit: Unit, corpus: Corpus, content: AnyContent = DOCUMENTS) -> UnitReader:
    """Every row and failure of a unit, in order."""
    return UnitReader(unit, corpus, content)
