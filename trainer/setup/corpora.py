"""The setting `data`: one corpus, or several with their weights."""

from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, Tag

from declutr.common.config import Strict
from declutr.trainer.data.mixture import MOST_TURNS, whole_shares


class Corpus(Strict):
    """One of several corpora that a task reads in turn."""

    path: str
    """Folder of its prepared shards, or their address."""
    weight: float = Field(gt=0)
    """Its share of the rows that the task reads, relative to the other weights; its size does not matter."""


def _checked(data: str | list[Corpus]) -> str | list[Corpus]:
    """Refuses weights with too many digits; a single corpus needs no weight."""
    if isinstance(data, str):
        return data
    if len(data) == 1:
        return data[0].path
    weights = [one.weight for one in data]
    if (period := sum(whole_shares(weights))) > MOST_TURNS:
        rounded = [max(1, round(1000 * weight / max(weights))) for weight in weights]
        raise ValueError(
            f"the weights {', '.join(f'{weight:g}' for weight in weights)} are exact only after {period:,} rows, at "
            f"most {MOST_TURNS:,} are possible; give fewer digits, such as {', '.join(map(str, rounded))}"
        )
    return data


def _form(value: Any) -> str:
    return "several" if isinstance(value, list) else "one"


Data = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[Corpus], Field(min_length=1), Tag("several")],
    Discriminator(_form),
    AfterValidator(_checked),
]


def places_of(data: str | list[Corpus]) -> tuple[str, ...]:
    """Folders or addresses of the corpora."""
    return (data,) if isinstance(data, str) else tuple(one.path for one in data)


def shares_of(data: str | list[Corpus]) -> tuple[int, ...]:
    """Shares of the corpora as whole numbers."""
    return (1,) if isinstance(data, str) else whole_shares([one.weight for one in data])
