"""Settings of `declutr export`, and its data, read and checked before an encoder is loaded."""

import os
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from declutr.common.config import Strict
from declutr.common.errors import DataError, UsageError, missing_extra
from declutr.common.paths import folder_problem
from declutr.encoders.protocol import unloadable
from declutr.evaluation.retrieval.pairs import RetrievalTest, read_test
from declutr.pipeline.config import found_again
from declutr.pipeline.readers.corpus import Document, FilesCorpus, ReadFailure, TextField
from declutr.trainer.metrics.judged_pairs import STSB_TEST, read_pairs

Target = Literal["onnx", "onnx-int8", "static"]


class ExportConfig(Strict):
    """Settings of one export."""

    model: str  # name as `load_encoder` takes it
    to: Target  # form to write: a graph in float32, a graph in 8-bit integers, or a table of token vectors
    output: Path  # folder to create
    # Maximum tokens of one input of a graph; the encoder's own limit if not set.
    max_tokens: int | None = Field(default=None, ge=1)
    # Files, folders and globs of your texts. A table has their words; the ranges of integers cover them; without `stsb`
    # and `pairs`, encoder and export are compared on them, integers on every second.
    corpus: list[str] = Field(default_factory=list)
    text_field: TextField = "text"  # key or column of the text in `corpus`, or several, as `prepare` takes them
    # 15,000 lose .2 points of STS-B (docs/evidence/log.md)
    vocabulary_size: int = Field(default=30_000, ge=100, le=1_000_000)  # most tokens of a table
    # 384 gain .3 points of STS-B (docs/evidence/log.md)
    dimensions: int = Field(default=256, ge=2)  # most numbers of an embedding of a table
    stsb: Path | None = None  # folder with STS-B's sts-test.csv, on which both encoders are scored
    pairs: Path | None = None  # Your queries with the texts that they should find, on which both encoders are scored
    # Run Python code that comes with the model. Only for models you trust.
    trust_remote_code: bool = Field(default=False, strict=True)


_FIELD = ". --text-field names the key or column of the text"
_CORPUS_CHARACTERS = 100_000_000
"""Most characters of a corpus that are read; more would hardly change the frequent words."""


@dataclass(frozen=True)
class Inputs:
    """Texts of an export."""

    corpus: list[str]  # the user's texts
    # texts of STS-B or of the test, on which encoder and export are compared; empty: those of the corpus, or general
    # sentences.
    measured: list[str]
    test: RetrievalTest | None  # the user's retrieval test
    # number of texts of the corpus that were read, of records that could not be by reason, and whether the corpus was
    # cut; None without a corpus.
    corpus_facts: dict[str, Any] | None


def read_inputs(config: ExportConfig) -> Inputs:
    """Read the data of an export."""
    problems, corpus, judged = list[str](), list[str](), list[str]()
    corpus_facts: dict[str, Any] | None = None
    test = None
    if problem := unloadable(config.model):
        problems.append(problem)
    if os.path.lexists(config.output):  # a dangling link is in the way too
        problems.append(f"--output {config.output}: exists already; name another folder")
    elif problem := folder_problem(config.output.absolute().parent):
        problems.append(f"--output {config.output}: {problem}")
    elif again := found_again(str(config.output.absolute()), config.corpus, ["README.md"]):
        problems.append(f"--output {config.output}: {again[0]}")
    needless = ("max_tokens",) if config.to == "static" else ("vocabulary_size", "dimensions")
    for name in needless:
        if name in config.model_fields_set and getattr(config, name) is not None:
            problems.append(f"--{name.replace('_', '-')}: has no effect with --to {config.to}; omit it")
    if config.to == "static" and not config.corpus:
        problems.append("--to static needs --corpus FILES: its table has the words of your texts")
    elif config.to != "static" and (absent := missing_extra("onnx", f"--to {config.to}")):
        problems.append(absent)
    if config.corpus:
        try:
            corpus, corpus_facts = _texts(config)
        except (UsageError, OSError) as error:
            problems.append(f"--corpus {' '.join(config.corpus)}: {error}")
    if config.stsb is not None:
        try:
            judged = [text for _, *both in read_pairs(config.stsb, STSB_TEST) for text in both]
        except DataError as error:
            problems.append(f"--stsb: {error}")
    if config.pairs is not None:
        try:
            test = read_test(config.pairs)
        except (DataError, OSError) as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    return Inputs(corpus, judged or ([*test.queries, *test.texts] if test else []), test, corpus_facts)


def _texts(config: ExportConfig) -> tuple[list[str], dict[str, Any]]:
    """Texts of files, folders and globs, and `Inputs.corpus_facts`."""
    from declutr.pipeline.job.units import UnitReader, plan_units  # loads pyarrow, for which no --help waits

    settings = {"kind": "files", "paths": config.corpus, "text_field": config.text_field}
    try:
        corpus = FilesCorpus.model_validate(settings)
    except ValidationError as error:
        raise UsageError(error.errors()[0]["msg"]) from error
    units, problems = plan_units(corpus, 1)
    if problems:
        message = "; ".join(problem.removeprefix("corpus.paths: ") for problem in problems)
        raise UsageError(message.replace("corpus.text_field", "--text-field"))
    texts, characters = list[str](), 0
    failures: Counter[str] = Counter()
    first: ReadFailure | None = None
    cut = False
    for record in chain.from_iterable(UnitReader(unit, corpus) for unit in units):
        # the corpus is held in memory, and a compressed file of any size is one unit
        if cut := characters >= _CORPUS_CHARACTERS:
            break
        if isinstance(record, Document):
            texts.append(record.text)
            characters += len(record.text)
        else:
            failures[record.reason] += 1
            first = first or record
    if not texts:
        why = f"; {failures.total():,} records cannot be read, the first: {first}" if first else ""
        raise UsageError(f"holds no text{why}{_FIELD if failures['no_text_field'] else ''}")
    return texts, {"read": len(texts), "skipped": dict(sorted(failures.items())), "cut": cut}
