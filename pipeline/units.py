"""Units of work: what one task reads. They depend on the inputs and the configuration alone, never on the workers."""

from collections.abc import Iterator, Sequence

from common.config import Strict
from common.storage import hash_json
from pipeline.corpus import FilesCorpus, Part, file_parts
from pipeline.pydocs import PythonDocs, python_parts, read_module, read_topics
from pipeline.readers import Record, read_jsonl, read_parquet, read_text

Corpus = FilesCorpus | PythonDocs
MIB = 2**20
_GZIP_RATIO = 3
"""English text is about three times its gzipped size: units are cut by the work in them."""


class Unit(Strict):
    """Some parts of the corpus, read in order by one task, which writes the shards named after the unit."""

    name: str
    """Five or more digits, the unit's place in the plan."""
    parts: list[Part]

    @property
    def num_bytes(self) -> int:
        """Input bytes."""
        return sum(part.num_bytes for part in self.parts)


def plan_units(corpus: Corpus, unit_mib: float) -> tuple[list[Unit], list[str]]:
    """Groups the corpus into units of about `unit_mib` of uncompressed input.

    Returns:
        The units, and what is wrong with the inputs: one line a problem.
    """
    unit_bytes = max(1, int(unit_mib * MIB))
    if isinstance(corpus, FilesCorpus):
        parts, problems = file_parts(corpus, unit_bytes)
    else:
        parts, problems = python_parts(), []
    groups: list[list[Part]] = []
    held = 0
    for part in parts:
        weight = part.num_bytes * (_GZIP_RATIO if part.path.endswith(".gz") else 1)
        if not groups or held + weight > unit_bytes:
            groups.append([])
            held = 0
        groups[-1].append(part)
        held += weight
    return [Unit(name=f"{index:05d}", parts=group) for index, group in enumerate(groups)], problems


def hash_unit(unit: Unit) -> str:
    """SHA-256 of what a unit reads, by the names and sizes of its parts rather than by where they lie."""
    return hash_json([part.model_dump(exclude={"path"}) for part in unit.parts])


def read_unit(unit: Unit, corpus: Corpus) -> Iterator[Record]:
    """Every document and failure of a unit, in order."""
    text_field = corpus.text_field if isinstance(corpus, FilesCorpus) else ""
    for part in unit.parts:
        match part.format:
            case "jsonl":
                yield from read_jsonl(part, text_field)
            case "text":
                yield from read_text(part)
            case "parquet":
                yield from read_parquet(part, text_field)
            case "python":
                yield from read_module(part)
            case "topics":
                yield from read_topics(part)


def largest_first(units: Sequence[Unit]) -> list[Unit]:
    """The order in which to start units: a large one started last would keep one worker busy alone."""
    return sorted(units, key=lambda unit: (-unit.num_bytes, unit.name))
