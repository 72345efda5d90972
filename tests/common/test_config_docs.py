"""Settings with their meanings as YAML with comments that reads back; test_repository.py has the tables."""

from typing import Annotated, Literal

import yaml
from pydantic import Field

from declutr.common.config import Strict
from declutr.common.config_docs import annotated_yaml, settings_tables


class Wool(Strict):
    """The wool of a sheep, shorn once a year
    and weighed."""

    colour: Literal["white", "black"] = "white"
    """Colour after washing."""
    weights: tuple[float, ...] = (1.5, 2.0)
    """Weights, kg | pounds."""
    use: Literal["sell", "spin"] = "sell"
    """sell: at the market. spin: at home."""


class Sheep(Strict):
    """An animal with wool.

    It eats grass.
    """

    kind: Literal["sheep"] = "sheep"
    wool: Wool = Wool(colour="black")


class Horse(Strict):
    """An animal to ride."""

    kind: Literal["horse"]
    names: dict[str, str] = Field(default_factory=dict)
    """Names by language."""


class Farm(Strict):
    """A farm."""

    animal: Annotated[Sheep | Horse, Field(discriminator="kind")] = Sheep()
    hay: Wool | None = None
    """Stored hay."""
    note: str
    """A note."""


FARM = """\
# An animal with wool. One of sheep, horse.
animal:
  kind: sheep
  # The wool of a sheep, shorn once a year and weighed.
  wool:
    # Colour after washing. One of white, black.
    colour: black
    # Weights, kg | pounds.
    weights: [1.5, 2.0]
    # sell: at the market. spin: at home.
    use: sell
# Stored hay.
hay: null
# A note.
note: a
"""


def test_yaml_holds_every_setting_with_its_meaning_and_odd_values_read_back():
    assert annotated_yaml(Farm(note="a")) == FARM
    assert any("kg \\| pounds" in line for line in settings_tables(Farm, "farm"))
    names = {"en": "# no comment", "a b: c": "two\nlines\n\n", "é": "x" * 300}
    for farm in (Farm(note="- a\n  b", animal=Horse(kind="horse", names=names)), Farm(note="", hay=Wool(weights=()))):
        assert Farm.model_validate(yaml.safe_load(annotated_yaml(farm))) == farm
