"""SentEval's 28 tasks and STS-B in ten languages: names, files, procedures and features, and the data of a task.

Names are SentEval's own (`senteval/engine.py` of facebookresearch/SentEval, commit 5d6dc11); labels are those of the
DeCLUTR papers' tables. The ten languages are those of stsb_multi_mt, which translated STS-B by machine; they are chosen
by name and belong to none of SentEval's sets and averages.

Legend: R rows of a split, I images, D features of an image.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from declutr.common.errors import UsageError, suggest
from declutr.evaluation.senteval import formats

Group = Literal["downstream", "probing", "multilingual"]
Procedure = Literal["inner_kfold", "kfold", "split", "relatedness", "retrieval", "similarity", "cosine"]
Files = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class SentEvalTask:
    """One task."""

    name: str  # SentEval's name
    label: str  # name in tables
    group: Group  # half of SentEval it belongs to, or multilingual
    # Scoring procedure. inner_kfold: nested cross-validation (the task has no split); kfold: regularisation by cross-
    # validation on train, then test; split: fixed train, dev, test; relatedness: softmax regression on five bins;
    # retrieval: images and captions; similarity: cosine, by subsets; cosine: of the dev and of the test pairs.
    procedure: Procedure
    folder: str  # folder below the data folder
    # Names of the files of each split or subset, in the order in which `read` takes them; all probing splits are in one
    # file.
    files: Files
    read: Callable[..., Any]  # reader of one split from its files
    keep_both: bool = False  # features of a pair (a, b) are `[a, b, a*b, |a-b|]`, not `[|a-b|, a*b]`
    # Name of each class, by its number; empty for gold scores, and for probing, where train has the names.
    classes: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, relative to the data folder, in reading order."""
        return tuple(f"{self.folder}/{name}" for names in self.files.values() for name in names)


_SPLITS, _FITTED, _SCORED = ("train", "dev", "test"), ("train", "test"), ("dev", "test")
_POLAR = ("negative", "positive")
_FINE = ("very negative", "negative", "neutral", "positive", "very positive")


def _files(*names: str, splits: tuple[str, ...] = _SPLITS) -> Files:
    """One file a split."""
    return {split: (name,) for split, name in zip(splits, names, strict=True)}


def _downstream(
    name: str,
    procedure: Procedure,
    files: Files,
    read: Callable[..., Any],
    label: str = "",
    folder: str = "",
    **more: Any,
) -> SentEvalTask:
    folder = f"downstream/{folder or name}"
    return SentEvalTask(name, label or name, "downstream", procedure, folder, files, read, **more)


def _similarity(year: int, *subsets: str) -> SentEvalTask:
    files = {subset: (f"STS.input.{subset}.txt", f"STS.gs.{subset}.txt") for subset in subsets}
    return _downstream(f"STS{year}", "similarity", files, formats.read_sts, folder=f"STS/STS{year}-en-test")


def _probing(name: str, label: str, file: str) -> SentEvalTask:
    return SentEvalTask(name, label, "probing", "split", "probing", {"all": (f"{file}.txt",)}, formats.read_probing)


def _translated(language: str) -> SentEvalTask:
    name, label, folder = f"STSBenchmark-{language}", f"STS-B-{language}", "downstream/STS/stsb-multi-mt"
    files = _files(f"stsb-{language}-dev.csv", f"stsb-{language}-test.csv", splits=_SCORED)
    return SentEvalTask(name, label, "multilingual", "cosine", folder, files, formats.read_translation)


_binary = partial(_downstream, procedure="inner_kfold", read=formats.read_binary)
_SENTIMENT = _files("sentiment-train", "sentiment-dev", "sentiment-test")
_TREC = _files("train_5500.label", "TREC_10.label", splits=_FITTED)
_MRPC = _files("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", splits=_FITTED)
_SNLI = {split: tuple(f"{column}.{split}" for column in ("s1", "s2", "labels")) for split in _SPLITS}
_SICK = _files("SICK_train.txt", "SICK_trial.txt", "SICK_test_annotated.txt")
_STSB = _files("sts-train.csv", "sts-dev.csv", "sts-test.csv")
_COCO = {
    split: (f"{name}.npy", f"{name}.captions.txt")
    for split, name in (("train", "train"), ("dev", "valid"), ("test", "test"))
}

TASKS: tuple[SentEvalTask, ...] = (
    _binary("CR", files={"all": ("custrev.pos", "custrev.neg")}, classes=_POLAR),
    _binary("MR", files={"all": ("rt-polarity.pos", "rt-polarity.neg")}, classes=_POLAR),
    _binary("MPQA", files={"all": ("mpqa.pos", "mpqa.neg")}, classes=_POLAR),
    _binary("SUBJ", files={"all": ("subj.objective", "subj.subjective")}, classes=("subjective", "objective")),
    _downstream("SST2", "split", _SENTIMENT, formats.read_sst_binary, folder="SST/binary", classes=_POLAR),
    _downstream("SST5", "split", _SENTIMENT, formats.read_sst_fine, folder="SST/fine", classes=_FINE),
    _downstream("TREC", "kfold", _TREC, formats.read_trec, classes=formats.TREC),
    _downstream("MRPC", "kfold", _MRPC, formats.read_mrpc, classes=("different", "paraphrase")),
    _downstream("SNLI", "split", _SNLI, formats.read_snli, keep_both=True, classes=formats.SNLI),
    _downstream("SICKEntailment", "split", _SICK, formats.read_entailment, "SICK-E", "SICK", classes=formats.SICK),
    _downstream("SICKRelatedness", "relatedness", _SICK, formats.read_relatedness, "SICK-R", "SICK"),
    _downstream("STSBenchmark", "relatedness", _STSB, formats.read_sts_benchmark, "STS-B", "STS/STSBenchmark"),
    _downstream("ImageCaptionRetrieval", "retrieval", _COCO, formats.read_retrieval, "COCO", "COCO"),
    _similarity(12, "MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    _similarity(13, "FNWN", "headlines", "OnWN"),  # its fourth subset, SMT, is licensed and in no published table
    _similarity(14, "deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    _similarity(15, "answers-forums", "answers-students", "belief", "headlines", "images"),
    _similarity(16, "answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
    _probing("Length", "SentLen", "sentence_length"),
    _probing("WordContent", "WC", "word_content"),
    _probing("Depth", "TreeDepth", "tree_depth"),
    _probing("TopConstituents", "TopConst", "top_constituents"),
    _probing("BigramShift", "BShift", "bigram_shift"),
    _probing("Tense", "Tense", "past_present"),
    _probing("SubjNumber", "SubjNum", "subj_number"),
    _probing("ObjNumber", "ObjNum", "obj_number"),
    _probing("OddManOut", "SOMO", "odd_man_out"),
    _probing("CoordinationInversion", "CoordInv", "coordination_inversion"),
)  # SentEval's tasks
LANGUAGES: tuple[str, ...] = ("de", "en", "es", "fr", "it", "nl", "pl", "pt", "ru", "zh")  # Languages of stsb_multi_mt
ALL_TASKS: tuple[SentEvalTask, ...] = (*TASKS, *map(_translated, LANGUAGES))

DOWNSTREAM: tuple[str, ...] = tuple(task.name for task in TASKS if task.group == "downstream")
PROBING: tuple[str, ...] = tuple(task.name for task in TASKS if task.group == "probing")
STS: tuple[str, ...] = ("STS12", "STS13", "STS14", "STS15", "STS16", "STSBenchmark", "SICKRelatedness")
"""The seven STS tasks of SimCSE and its followers."""
TRANSFER: tuple[str, ...] = ("MR", "CR", "SUBJ", "MPQA", "SST2", "TREC", "MRPC")
"""The seven transfer tasks that SimCSE and its followers print, by accuracy."""
STSB_MULTI: tuple[str, ...] = tuple(f"STSBenchmark-{language}" for language in LANGUAGES)
SETS: Mapping[str, tuple[str, ...]] = {
    "all": DOWNSTREAM + PROBING,
    "downstream": DOWNSTREAM,
    "probing": PROBING,
    "sts": STS,
    "transfer": TRANSFER,
    "stsb-multi": STSB_MULTI,
}  # sets of tasks by name; "all" has SentEval's 28

# Tables have the label, SentEval's code the name; users type either.
_BY_NAME = {name.lower(): task for task in ALL_TASKS for name in (task.name, task.label)}


def find(name: str, other_names: Collection[str] = ()) -> SentEvalTask:
    """Find the task of that name or label, in any case; `other_names` are further names to suggest (sets of tasks)."""
    task = _BY_NAME.get(name.lower())
    if task is None:
        near = suggest(name, [*(word for task in ALL_TASKS for word in (task.name, task.label)), *other_names])
        raise UsageError(
            f"no task {name!r}{near}{' There' if near else '; there'} are "
            f"{', '.join(dict.fromkeys([*(task.name for task in ALL_TASKS), *other_names]))}"
        )
    return task


def choose_tasks(words: Iterable[str]) -> tuple[str, ...]:
    """Resolve names, labels and sets (`SETS`) to tasks, in the order of the tables."""
    chosen = {name for word in words for name in SETS.get(word.lower()) or (find(word, SETS).name,)}
    return tuple(task.name for task in ALL_TASKS if task.name in chosen)


EMPTY = "."  # Replacement for a line without words: SentEval's examples and DeCLUTR's script embed a full stop for it


@dataclass(frozen=True)
class Split:
    """Rows of one split, or of one subset of an STS task, in the order SentEval gives them to its classifiers."""

    first: tuple[str, ...]  # R first sentences, words joined by one space
    second: tuple[str, ...] | None  # R second sentences, or None if a row is one sentence
    # `(R,)`; int64 classes from 0, or float64 gold scores. Retrieval: `(R,)` index of the caption's image.
    labels: NDArray[np.int64] | NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class TaskData:
    """All data of a task."""

    task: SentEvalTask
    # Parts: "all" for inner_kfold; "train", "test" for kfold; "train", "dev", "test"; an STS task's subsets; "dev",
    # "test" for cosine.
    splits: Mapping[str, Split]
    classes: tuple[str, ...]  # name of each class, by its number; empty for gold scores
    files: Mapping[str, str]  # files read, relative to the data folder, with git's SHA-1 of each
    # `(I, D)` float32 image features by split (retrieval alone).
    features: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of all splits."""
        return sum(map(len, self.splits.values()))


def without_train(data: TaskData) -> TaskData:
    """The task without its training pairs, which a cosine does not need."""
    return replace(data, splits={name: split for name, split in data.splits.items() if name != "train"})


def sentences(data: TaskData) -> tuple[str, ...]:
    """Each distinct sentence of the task once, in order of first appearance."""
    return tuple(sentence_rows([data]))


def sentence_rows(tasks: Iterable[TaskData]) -> dict[str, int]:
    """Map each distinct sentence of all tasks to a row number, so that each is embedded once."""
    rows: dict[str, int] = {}
    for data in tasks:
        for split in data.splits.values():
            for text in (*split.first, *(split.second or ())):
                rows.setdefault(text, len(rows))
    return rows


Standing = Literal["identical", "unverified", "unpublished", "refused", "missing"]
MARKS: Mapping[Standing, str] = {
    "unverified": "no hash of the published files is known; comparable with no published number",
    "unpublished": "not the published data; comparable with no published number",
}  # reason for the mark on a score, by its data's standing


@dataclass(frozen=True)
class Inspection:
    """Data of a task and how far they can be trusted."""

    task: SentEvalTask
    # identical: every file equals the published one byte for byte. unverified: no hash of the published files is known,
    # and the numbers of rows match. unpublished: a file or a number differs, and the user accepted that. refused.
    # missing: the files do not exist. Only scores of identical data carry no mark.
    standing: Standing
    findings: tuple[str, ...]  # what is wrong with them or to be known of them, worst first
    # Data of the task, None if missing or unreadable. Refused data are included for inspection.
    data: TaskData | None = None

    @property
    def usable(self) -> bool:
        """True if a score may be computed."""
        return self.standing in ("identical", *MARKS)

    @property
    def reason(self) -> str:
        """Reason for a missing score, in one line; "" if a score may be computed."""
        return "" if self.usable else "; ".join(self.findings)
