"""Data of an export, read and checked before an encoder is loaded."""

import os
from dataclasses import dataclass
from importlib import import_module

from pydantic import ValidationError

from declutr.common.paths import folder_problem
from declutr.evaluation.encoders.protocol import missing
from declutr.evaluation.export.config import ExportConfig, ExportError
from declutr.evaluation.retrieval.pairs import PairsError, RetrievalTest, read_test
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.readers.corpus import Document, FilesCorpus

_LIBRARIES = ("onnx", "onnxscript", "onnxruntime")
_CORPUS_CHARACTERS = 100_000_000
"""Most characters of a corpus that are read; more would hardly change the frequent words."""


@dataclass(frozen=True)
class Inputs:
    """Texts of an export.

    Attributes:
        corpus: the user's texts.
        measured: texts of STS-B or of the test, on which encoder and export are compared; empty: those of the corpus,
            or general sentences.
        test: the user's retrieval test.
    """

    corpus: list[str]
    measured: list[str]
    test: RetrievalTest | None


def read_inputs(config: ExportConfig) -> Inputs:
    """Read the data of an export.

    Raises:
        ExportError: every problem of the settings and the data.
    """
    problems: list[str] = []
    corpus: list[str] = []
    judged: list[str] = []
    test = None
    if problem := missing(config.model):
        problems.append(problem)
    if os.path.lexists(config.output):
        problems.append(f"--output {config.output}: exists already; name another folder, or remove it")
    elif problem := folder_problem(config.output.absolute().parent):
        problems.append(f"--output {config.output}: {problem}")
    if config.to == "static" and not config.corpus:
        problems.append("--to static needs --corpus FILES: its table has the words of your texts")
    elif config.to != "static" and (lacking := _lacking()):
        problems.append(f"--to {config.to} needs {lacking}: pip install {' '.join(_LIBRARIES)}")
    if config.corpus:
        try:
            corpus = _texts(config.corpus)
        except (ExportError, OSError) as error:
            problems.append(f"--corpus {' '.join(config.corpus)}: {error}")
    if config.stsb is not None:
        from declutr.evaluation.retrieval.similarity import STSB_TEST  # loads torch
        from declutr.trainer.metrics.judged_pairs import StsError, read_pairs

        try:
            judged = [text for _, *both in read_pairs(config.stsb, STSB_TEST) for text in both]
        except StsError as error:
            problems.append(f"--stsb: {error}")
    if config.pairs is not None:
        try:
            test = read_test(config.pairs)
        except (PairsError, OSError) as error:
            problems.append(str(error))
    if problems:
        raise ExportError("\n".join(problems))
    return Inputs(corpus, judged or ([*test.queries, *test.texts] if test else []), test)


def _lacking() -> str | None:
    """Name of the first library that is not installed."""
    for name in _LIBRARIES:
        try:
            import_module(name)
        except ImportError:
            return name
    return None


def _texts(paths: list[str]) -> list[str]:
    """Texts of files, folders and globs.

    Raises:
        ExportError: nothing can be read.
    """
    try:
        corpus = FilesCorpus.model_validate({"kind": "files", "paths": paths})
    except ValidationError as error:
        raise ExportError(error.errors()[0]["msg"]) from error
    units, problems = plan_units(corpus, 1)
    if problems:
        raise ExportError("; ".join(problem.removeprefix("corpus.paths: ") for problem in problems))
    found, characters = list[str](), 0
    for unit in units:
        for record in read_unit(unit, corpus):
            if isinstance(record, Document):
                found.append(record.text)
                characters += len(record.text)
        if characters >= _CORPUS_CHARACTERS:
            break
    if not found:
        raise ExportError("holds no text")
    return found
