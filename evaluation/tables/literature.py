"""Published numbers of the DeCLUTR, SimCSE, SCD, VisualCSE, AudioCSE and SCL papers, as scores of tasks.

They are read off the papers' tables (`published.json`), two decimals as printed. STS12-16 are put together in three
ways by these papers; a score stands under the name of its own way and under no other.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import Field, model_validator

from common.config import Strict
from evaluation.senteval.data.tasks import find
from evaluation.senteval.scores.results import Protocol

Aggregation = Literal["mean", "wmean", "all"]
_RECALLS = tuple(f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10))


class PublishedModel(Strict):
    """A row of a paper."""

    model: str
    source: str
    """Paper and tables."""
    sts: Aggregation
    """How the subsets of STS12-16 are put together."""
    scores: Mapping[str, tuple[float, ...]]
    """Percent by task; for MRPC accuracy and F1 where both are printed."""
    pretrained: str = ""
    """Row of the same paper with the encoder that this one was trained on from; "" where it has none."""
    doubt: str = ""
    """Why some of these numbers are to be doubted."""
    doubted: tuple[str, ...] = ()
    """Which."""

    @model_validator(mode="after")
    def _tasks_are_known(self) -> "PublishedModel":
        for name in (*self.scores, *self.doubted):
            find(name)
        return self

    @property
    def protocol(self) -> Protocol:
        """Whose procedure the numbers come from: STS-B and SICK-R by regression, or by cosine."""
        return "senteval" if self.sts == "mean" else "simcse"

    def results(self) -> Mapping[str, Mapping[str, float]]:
        """Scores by task, named as our own results name them."""
        return {name: self._named(name, values) for name, values in self.scores.items()}

    def _named(self, task: str, values: tuple[float, ...]) -> Mapping[str, float]:
        procedure = find(task).procedure
        if procedure == "similarity":
            return {f"spearman.{self.sts}": values[0] / 100}
        if procedure == "relatedness":
            return {"spearman": values[0] / 100}
        if procedure == "retrieval":  # the mean of the six is what is printed
            return dict.fromkeys(_RECALLS, values[0])
        return dict(zip(("acc", "f1"), values, strict=False))


class _Document(Strict):
    note: str
    papers: tuple[PublishedModel, ...] = Field(min_length=1)


@cache
def literature() -> tuple[PublishedModel, ...]:
    """All rows, in the order of the papers."""
    return _Document.model_validate_json(files("evaluation.tables").joinpath("published.json").read_bytes()).papers
