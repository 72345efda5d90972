"""Data of a task, from a folder in SentEval's layout (`downstream/` and `probing/`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from declutr.common.console.terminal import excerpt
from declutr.common.errors import DataError, MissingDataError
from declutr.evaluation.senteval.data import formats
from declutr.evaluation.senteval.data.formats import SplitRows
from declutr.evaluation.senteval.data.lines import git_sha1
from declutr.evaluation.senteval.data.retrieval_files import SPLITS, read_retrieval, refuse_pickles
from declutr.evaluation.senteval.data.taskdata import EMPTY, Split, TaskData
from declutr.evaluation.senteval.data.tasks import LANGUAGES, SentEvalTask

_BINARY = {  # class 1, class 0
    "CR": ("custrev.pos", "custrev.neg"),
    "MR": ("rt-polarity.pos", "rt-polarity.neg"),
    "MPQA": ("mpqa.pos", "mpqa.neg"),
    "SUBJ": ("subj.objective", "subj.subjective"),
}
_PROBING = {
    "Length": "sentence_length",
    "WordContent": "word_content",
    "Depth": "tree_depth",
    "TopConstituents": "top_constituents",
    "BigramShift": "bigram_shift",
    "Tense": "past_present",
    "SubjNumber": "subj_number",
    "ObjNumber": "obj_number",
    "OddManOut": "odd_man_out",
    "CoordinationInversion": "coordination_inversion",
}
_SENTIMENT = {"train": "sentiment-train", "dev": "sentiment-dev", "test": "sentiment-test"}
_SICK = {"train": "SICK_train.txt", "dev": "SICK_trial.txt", "test": "SICK_test_annotated.txt"}
_SPLIT_FILES = {
    "SST2": _SENTIMENT,
    "SST5": _SENTIMENT,
    "TREC": {"train": "train_5500.label", "test": "TREC_10.label"},
    "MRPC": {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"},
    "SICKEntailment": _SICK,
    "SICKRelatedness": _SICK,
    "STSBenchmark": {"train": "sts-train.csv", "dev": "sts-dev.csv", "test": "sts-test.csv"},
    **{f"STSBenchmark-{name}": {part: f"stsb-{name}-{part}.csv" for part in ("dev", "test")} for name in LANGUAGES},
}
_CLASSES = {
    "CR": ("negative", "positive"),
    "MR": ("negative", "positive"),
    "MPQA": ("negative", "positive"),
    "SUBJ": ("subjective", "objective"),
    "SST2": ("negative", "positive"),
    "SST5": ("very negative", "negative", "neutral", "positive", "very positive"),
    "TREC": formats.TREC,
    "MRPC": ("different", "paraphrase"),
    "SNLI": formats.SNLI,
    "SICKEntailment": formats.SICK,
}


def task_files(task: SentEvalTask) -> tuple[str, ...]:
    """Files of the task, relative to the data folder, in reading order."""
    if task.group == "probing":
        names = [f"{_PROBING[task.name]}.txt"]
    elif task.procedure == "similarity":
        names = [f"STS.{kind}.{subset}.txt" for subset in task.subsets for kind in ("input", "gs")]
    elif task.procedure == "retrieval":
        names = [f"{name}{end}" for name in SPLITS.values() for end in (".npy", ".captions.txt")]
    elif task.name == "SNLI":
        names = [f"{column}.{split}" for split in ("train", "dev", "test") for column in ("s1", "s2", "labels")]
    else:
        names = [*_BINARY.get(task.name, ()), *_SPLIT_FILES.get(task.name, {}).values()]
    return tuple(f"{task.folder}/{name}" for name in names)


def load(task: SentEvalTask, folder: Path) -> TaskData:
    """Read a task as SentEval does, with rows in the order in which SentEval passes them to its classifiers.

    Raises:
        MissingDataError: no file of the task exists.
        DataError: files are missing or cannot be read; the message names file and line.
    """
    paths = [folder / name for name in task_files(task)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        if task.procedure == "retrieval":
            refuse_pickles(folder / task.folder)
        kind = MissingDataError if len(missing) == len(paths) else DataError
        there = f" ({len(paths) - len(missing)} of {len(paths)} files are there)" if kind is DataError else ""
        raise kind(
            f"{folder / task.folder}: no {excerpt(missing)}{there}; --data names the folder that holds "
            f"{task.folder.partition('/')[0]}/, and names of files are case-sensitive"
        )
    features: dict[str, NDArray[np.float32]] = {}
    rows = _read(task, folder / task.folder, features)
    classes = _CLASSES.get(task.name, ())
    if task.group == "probing":
        classes = tuple(sorted({str(label) for label in rows["train"].labels}))
    return TaskData(
        task=task,
        splits={name: _in_official_order(task, part, classes, name) for name, part in rows.items()},
        classes=classes,
        files={name: git_sha1(folder / name) for name in task_files(task)},
        features=features,
        notes=tuple(note for part in rows.values() for note in part.notes),
    )


def _read(task: SentEvalTask, folder: Path, features: dict[str, NDArray[np.float32]]) -> Mapping[str, SplitRows]:
    if task.name in _BINARY:
        ones_file, zeros_file = _BINARY[task.name]
        return {"all": formats.read_binary(folder / ones_file, folder / zeros_file)}
    if task.group == "probing":
        return formats.read_probing(folder / f"{_PROBING[task.name]}.txt")
    if task.procedure == "similarity":
        return {
            subset: formats.read_sts(folder / f"STS.input.{subset}.txt", folder / f"STS.gs.{subset}.txt")
            for subset in task.subsets
        }
    if task.procedure == "retrieval":
        rows = {}
        for split in SPLITS:
            rows[split], features[split] = read_retrieval(folder, split)
        return rows
    if task.name == "SNLI":
        return {
            split: formats.read_snli(folder / f"s1.{split}", folder / f"s2.{split}", folder / f"labels.{split}")
            for split in ("train", "dev", "test")
        }
    if task.procedure == "cosine":
        return {split: formats.read_translation(folder / name) for split, name in _SPLIT_FILES[task.name].items()}
    readers = {
        "SST2": formats.read_sst_binary,
        "SST5": formats.read_sst_fine,
        "TREC": formats.read_trec,
        "MRPC": formats.read_mrpc,
        "SICKEntailment": lambda path: formats.read_sick(path, entailment=True),
        "SICKRelatedness": lambda path: formats.read_sick(path, entailment=False),
        "STSBenchmark": formats.read_sts_benchmark,
    }
    return {split: readers[task.name](folder / name) for split, name in _SPLIT_FILES[task.name].items()}


def _in_official_order(task: SentEvalTask, rows: SplitRows, classes: tuple[str, ...], split: str) -> Split:
    """Sort by numbers of words, then label; this order decides the classifiers' folds and batches."""
    labels = _numbers(task, rows, classes, split)
    first = np.array([len(words) for words in rows.first], dtype=np.int64)
    second = np.array([len(words) for words in rows.second], dtype=np.int64)
    last: NDArray[Any] = labels
    if task.name == "SNLI":  # by hypothesis first, and labels by their names
        first, second = second, first
        last = np.array([sorted(classes).index(classes[label]) for label in labels], dtype=np.int64)
    if task.procedure == "retrieval":
        order = np.arange(len(labels))
    else:
        order = np.lexsort((last, second, first) if rows.second else (last, first))  # stable, the last key leads
    return Split(
        first=tuple(" ".join(rows.first[row]) or EMPTY for row in order),
        second=tuple(" ".join(rows.second[row]) or EMPTY for row in order) if rows.second else None,
        labels=labels[order],
        order=order.astype(np.int64),
        unscored=tuple(
            (place, " ".join(first_words) or EMPTY, " ".join(second_words) or EMPTY)
            for place, first_words, second_words in rows.unscored
        ),
    )


def _numbers(task: SentEvalTask, rows: SplitRows, classes: tuple[str, ...], split: str) -> NDArray[Any]:
    if task.group != "probing":
        scores = task.procedure in ("relatedness", "similarity", "cosine")
        return np.array(rows.labels, dtype=np.float64 if scores else np.int64)
    unknown = sorted({str(label) for label in rows.labels} - set(classes))
    if unknown:
        raise DataError(f"{task.name}: {split} has classes that train does not have: {', '.join(unknown[:5])}")
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[str(label)] for label in rows.labels], dtype=np.int64)
