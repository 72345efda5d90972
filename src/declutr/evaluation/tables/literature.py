"""Published numbers of the DeCLUTR, SimCSE, SCD, VisualCSE, AudioCSE and SCL papers, as scores of tasks.

The numbers are copied from the papers' tables (`published.json`), with two decimals as printed. These papers aggregate
STS12-16 in three ways; a score is stored only under the name of its way.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import Field, model_validator

from declutr.common.config import Strict
from declutr.evaluation.senteval.data.tasks import find
from declutr.evaluation.senteval.scores.results import RECALLS, Protocol

Aggregation = Literal["mean", "wmean", "all"]


class PublishedModel(Strict):
    """Row of a paper's table."""

    model: str
    source: str
    """Paper and table numbers."""
    sts: Aggregation
    """Aggregation of the subsets of STS12-16."""
    split: Literal["test", "dev"] = "test"
    """Split of the numbers of STS-B in other languages."""
    scores: Mapping[str, tuple[float, ...]]
    """Percent by task; for MRPC accuracy and F1 where both are printed."""
    pretrained: str = ""
    """Row of the same paper with the encoder from which this one was trained; "" if none."""
    doubt: str = ""
    """Reason to doubt some of these numbers."""
    doubted: tuple[str, ...] = ()
    """Tasks of the doubted numbers."""

    @model_validator(mode="after")
    def _tasks_are_known(self) -> "PublishedModel":
        for name in (*self.scores, *self.doubted):
            find(name)
        return self

    @property
    def protocol(self) -> Protocol:
        """Protocol of the numbers: STS-B and SICK-R by regression (senteval) or by cosine (simcse)."""
        return "senteval" if self.sts == "mean" else "simcse"

    def results(self) -> Mapping[str, Mapping[str, float]]:
        """Scores by task, named like the results of this project."""
        return {name: self._by_metric(name, values) for name, values in self.scores.items()}

    def _by_metric(self, task: str, values: tuple[float, ...]) -> Mapping[str, float]:
        procedure = find(task).procedure
        if procedure == "similarity":
            return {f"spearman.{self.sts}": values[0] / 100}
        if procedure == "relatedness":
            return {"spearman": values[0] / 100}
        if procedure == "cosine":
            return {"spearman" if self.split == "test" else "devspearman": values[0] / 100}
        if procedure == "retrieval":  # the printed number is the mean of the six recalls
            return dict.fromkeys(RECALLS, values[0])
        return dict(zip(("acc", "f1"), values, strict=False))


class _Document(Strict):
    note: str
    papers: tuple[PublishedModel, ...] = Field(min_length=1)


@cache
def literature() -> tuple[PublishedModel, ...]:
    """All rows, in the order of the papers."""
    return _Document.model_validate_json(files(__package__).joinpath("published.json").read_bytes()).papers
