"""The 28 tasks of SentEval, and STS-B in ten languages: names, scoring procedures, and features.

Names are SentEval's own (`senteval/engine.py` of facebookresearch/SentEval, commit 5d6dc11); labels are those of the
DeCLUTR papers' tables. The ten languages are those of stsb_multi_mt, which translated STS-B by machine; they are chosen
by name and belong to none of SentEval's sets and averages.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from declutr.common.errors import UsageError, suggest

Group = Literal["downstream", "probing", "multilingual"]
Procedure = Literal["inner_kfold", "kfold", "split", "relatedness", "retrieval", "similarity", "cosine"]
Features = Literal["single", "difference_product", "pair_product_difference"]


@dataclass(frozen=True)
class SentEvalTask:
    """One task."""

    name: str
    """SentEval's name."""
    label: str
    """Name in tables."""
    group: Group
    """Half of SentEval it belongs to, or multilingual."""
    procedure: Procedure
    """Scoring procedure. inner_kfold: nested cross-validation (the task has no split); kfold: regularisation by
    cross-validation on train, then test; split: fixed train, dev, test; relatedness: softmax regression on five bins;
    retrieval: images and captions; similarity: cosine, by subsets; cosine: of the dev and of the test pairs."""
    features: Features
    """Features of a sentence, or of a pair (a, b): `[|a-b|, a*b]` or `[a, b, a*b, |a-b|]`."""
    folder: str
    """Folder below the data folder."""
    subsets: tuple[str, ...] = ()
    """Names of the parts that are correlated separately (similarity alone)."""

    @property
    def pairs(self) -> bool:
        """Return whether a row has two sentences."""
        return self.procedure in ("similarity", "cosine") or self.features != "single"

    @property
    def has_dev(self) -> bool:
        """Return whether scores on dev data exist, by split or by cross-validation; if not, all its data are test."""
        return self.procedure != "similarity"


def _downstream(name: str, procedure: Procedure, folder: str = "", features: Features = "single") -> SentEvalTask:
    return SentEvalTask(name, name, "downstream", procedure, features, f"downstream/{folder or name}")


def _similarity(year: int, *subsets: str) -> SentEvalTask:
    folder = f"downstream/STS/STS{year}-en-test"
    return SentEvalTask(f"STS{year}", f"STS{year}", "downstream", "similarity", "single", folder, subsets)


def _probing(name: str, label: str) -> SentEvalTask:
    return SentEvalTask(name, label, "probing", "split", "single", "probing")


def _translated(language: str) -> SentEvalTask:
    folder = "downstream/STS/stsb-multi-mt"
    return SentEvalTask(f"STSBenchmark-{language}", f"STS-B-{language}", "multilingual", "cosine", "single", folder)


TASKS: tuple[SentEvalTask, ...] = (
    _downstream("CR", "inner_kfold"),
    _downstream("MR", "inner_kfold"),
    _downstream("MPQA", "inner_kfold"),
    _downstream("SUBJ", "inner_kfold"),
    _downstream("SST2", "split", "SST/binary"),
    _downstream("SST5", "split", "SST/fine"),
    _downstream("TREC", "kfold"),
    _downstream("MRPC", "kfold", features="difference_product"),
    _downstream("SNLI", "split", features="pair_product_difference"),
    SentEvalTask("SICKEntailment", "SICK-E", "downstream", "split", "difference_product", "downstream/SICK"),
    SentEvalTask("SICKRelatedness", "SICK-R", "downstream", "relatedness", "difference_product", "downstream/SICK"),
    SentEvalTask(
        "STSBenchmark", "STS-B", "downstream", "relatedness", "difference_product", "downstream/STS/STSBenchmark"
    ),
    SentEvalTask("ImageCaptionRetrieval", "COCO", "downstream", "retrieval", "single", "downstream/COCO"),
    _similarity(12, "MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    _similarity(13, "FNWN", "headlines", "OnWN"),  # its fourth subset, SMT, is licensed and in no published table
    _similarity(14, "deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    _similarity(15, "answers-forums", "answers-students", "belief", "headlines", "images"),
    _similarity(16, "answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
    _probing("Length", "SentLen"),
    _probing("WordContent", "WC"),
    _probing("Depth", "TreeDepth"),
    _probing("TopConstituents", "TopConst"),
    _probing("BigramShift", "BShift"),
    _probing("Tense", "Tense"),
    _probing("SubjNumber", "SubjNum"),
    _probing("ObjNumber", "ObjNum"),
    _probing("OddManOut", "SOMO"),
    _probing("CoordinationInversion", "CoordInv"),
)
"""SentEval's tasks."""
LANGUAGES: tuple[str, ...] = ("de", "en", "es", "fr", "it", "nl", "pl", "pt", "ru", "zh")
"""Languages of stsb_multi_mt."""
TRANSLATED: tuple[SentEvalTask, ...] = tuple(_translated(language) for language in LANGUAGES)
"""STS-B in each language."""
ALL_TASKS: tuple[SentEvalTask, ...] = TASKS + TRANSLATED

DOWNSTREAM: tuple[str, ...] = tuple(task.name for task in TASKS if task.group == "downstream")
PROBING: tuple[str, ...] = tuple(task.name for task in TASKS if task.group == "probing")
STS: tuple[str, ...] = ("STS12", "STS13", "STS14", "STS15", "STS16", "STSBenchmark", "SICKRelatedness")
"""The seven STS tasks of SimCSE and its followers."""
TRANSFER: tuple[str, ...] = ("MR", "CR", "SUBJ", "MPQA", "SST2", "TREC", "MRPC")
"""The seven transfer tasks that SimCSE and its followers print, by accuracy."""

STSB_MULTI: tuple[str, ...] = tuple(task.name for task in TRANSLATED)

_BY_NAME = {name.lower(): task for task in ALL_TASKS for name in (task.name, task.label)}


def find(name: str, other_names: Collection[str] = ()) -> SentEvalTask:
    """Find the task of that name or label, in any case; `other_names` are further names to suggest (sets of tasks).

    Raises:
        UsageError: no task matches; the message has the nearest name and lists all names.
    """
    task = _BY_NAME.get(name.lower())
    if task is None:
        near = suggest(name, [*(word for task in ALL_TASKS for word in (task.name, task.label)), *other_names])
        raise UsageError(
            f"no task {name!r}{near}{' There' if near else '; there'} are "
            f"{', '.join(dict.fromkeys([*(task.name for task in ALL_TASKS), *other_names]))}"
        )
    return task
