"""Settings of Matryoshka sizes: parts of an embedding that are trained together. Readable without torch."""

from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

from declutr.common.config import Strict

Size = int | Literal["all"]


class MatryoshkaConfig(Strict):
    """Matryoshka (Kusupati et al. 2022): the first numbers of an embedding are trained as embeddings, too."""

    sizes: list[Size]
    """Sizes whose losses are added, such as [32, 64, 128, all]: the first numbers of the exported embedding; all, which
    must be one of them: the whole."""
    weights: list[float] | None = None
    """Weights of the sizes' losses; null: 1 each. An MLM loss next to their sum weighs less unless they add up to 1."""

    @field_validator("sizes", mode="before")
    @classmethod
    def _whole_numbers(cls, sizes: Any) -> Any:
        """Refuses what is no size, before pydantic would convert it."""
        if not isinstance(sizes, list | tuple) or not sizes:
            raise ValueError("must be a list of sizes, such as [32, 64, 128, all]")
        wrong = [size for size in sizes if size != "all" and not (type(size) is int and size >= 1)]
        if wrong:
            raise ValueError(f"{', '.join(map(repr, wrong))}: a size must be a whole number from 1, or all")
        if doubled := sorted({str(size) for size in sizes if sizes.count(size) > 1}):
            raise ValueError(f"{', '.join(doubled)} is listed twice; list each size once")
        return list(sizes)

    @field_validator("weights")
    @classmethod
    def _one_each(cls, weights: list[float] | None, info: ValidationInfo) -> list[float] | None:
        number = len(info.data.get("sizes", weights or []))
        if weights is not None and len(weights) != number:
            raise ValueError(f"{number} sizes need {number} weights, one each, not {len(weights)}")
        if weights is not None and (min(weights, default=0) < 0 or not any(weights)):
            raise ValueError("a weight must be a number from 0, and one of them above 0")
        return weights

    @property
    def total_weight(self) -> float:
        """Sum of the weights: the loss of guessing grows by this factor."""
        return sum(self.weights or [1.0] * len(self.sizes))

    def cuts(self, embedding_size: int) -> list[tuple[int, float]]:
        """Each size with its weight, the whole embedding as `embedding_size`."""
        sizes = [embedding_size if size == "all" else size for size in self.sizes]
        return list(zip(sizes, self.weights or [1.0] * len(sizes), strict=True))

    def smaller(self, embedding_size: int) -> tuple[int, ...]:
        """The sizes below that of the whole embedding, ascending."""
        return tuple(sorted(size for size, _ in self.cuts(embedding_size) if size < embedding_size))

    def problem(self, embedding_size: int) -> str | None:
        """The reason why an embedding of this size has not these sizes, or None."""
        found = [size for size, _ in self.cuts(embedding_size)]
        told = f"objective.matryoshka.sizes = [{', '.join(map(str, self.sizes))}]"
        if large := [size for size in found if size > embedding_size]:
            return f"{told}: the embedding has {embedding_size} numbers; remove {', '.join(map(str, large))}"
        if found.count(embedding_size) > 1:
            return f"{told}: all and {embedding_size} are the same size; remove one of them"
        if embedding_size not in found:
            return f"{told}: nothing would train the last of {embedding_size} numbers; add all"
        return None
