"""Configurations of an item's runs, shards and start: read, and changed as the item and the command say."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from declutr.common.config import ConfigError, Strict, load_config
from declutr.common.suggestions import suggest
from declutr.encoders.modules import read_recipe
from declutr.encoders.protocol import EncoderError
from declutr.reproduction.item import (
    DATA,
    SENTEVAL,
    START,
    WORK,
    Cell,
    Column,
    Prepared,
    ReproduceError,
    Scale,
    Settings,
)
from declutr.trainer.objectives.config import NN_ACCURACY
from declutr.trainer.objectives.row_score import REPORTED
from declutr.trainer.setup.config import TrainConfig

_OTHER_SCORES = ("alignment", "uniformity", "effective_rank", "distant_share")

Config = TypeVar("Config", bound=Strict)


def run_config(scale: Scale, cell: Cell, changes: Settings, own: Settings) -> TrainConfig:
    """The configuration of a run.

    Args:
        scale: its scale.
        cell: its cell.
        changes: the command's changes for all runs.
        own: its folder and seed.

    Raises:
        ReproduceError: a setting is wrong.
    """
    given = scale.settings | cell.settings
    inside = tuple(f"{key}." for key in changes)  # a section that is given replaces what the item has of it
    others = {*TrainConfig.alternatives} if {*TrainConfig.alternatives} & {*changes} else set()
    kept = {key: value for key, value in given.items() if key not in others and not key.startswith(inside)}
    values = kept | changes
    made = Prepared(config=str(values.pop("config", scale.config)), settings=values)
    return load_made(made, "train", TrainConfig, cell.name, own)


def load_made(made: Prepared, section: str, model: type[Config], what: str, own: Settings) -> Config:
    """A configuration with its changes, and the variables of this project in its values replaced.

    Raises:
        ReproduceError: a setting is wrong.
    """
    words = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in (made.settings | own).items()]
    try:
        config = load_config(made.config, section, model, words)
    except ConfigError as error:
        raise ReproduceError(f"{what}: {'; '.join(error.problems)} ({made.config})") from error
    return model.model_validate(replaced(config.model_dump(mode="json", exclude_unset=True)))


def replaced(value: Any) -> Any:
    """Values with the variables of this project replaced."""
    if isinstance(value, dict):
        return {key: replaced(one) for key, one in value.items()}
    if isinstance(value, list):
        return [replaced(one) for one in value]
    if isinstance(value, str):
        for name in (DATA, SENTEVAL, WORK, START):
            value = value.replace(f"${name}", os.environ[name])
    return value


def refuse_unknown_scores(columns: Mapping[str, Column], config: TrainConfig, what: str) -> None:
    """Refuses a column of a score that no validation of a run has.

    Args:
        columns: the columns.
        config: configuration of the run.
        what: its name.

    Raises:
        ReproduceError: naming the column.
    """
    validation, objective = config.validation, config.objective
    of_rows = [*validation.pairs, *objective.scores]
    cuts = [size for size in objective.matryoshka.sizes if size != "all"] if objective.matryoshka else []
    whole = [*of_rows, *_OTHER_SCORES]
    known = [*whole, *(f"{name}_{size}" for name in whole for size in cuts)]
    known += [REPORTED + name for name in ([validation.score] if validation.score in known else known)]
    known += [f"{name}_{NN_ACCURACY}" for name in config.auxiliary_tasks]
    for name, column in columns.items():
        if column.validation and not validation.every_steps:
            raise ReproduceError(
                f"column {name}: {what} has no scores, because validation.every_steps = 0; set it above 0"
            )
        if column.validation and column.validation not in known:
            raise ReproduceError(
                f"column {name}: {what} has no score {column.validation}{suggest(column.validation, known)}; it has "
                f"{', '.join(known)}"
            )


def prompt_of(start: Path) -> str:
    """The text that an encoder in a folder puts before each text; "" if none.

    Raises:
        ReproduceError: its files are damaged.
    """
    try:
        recipe = read_recipe(str(start), "mean")  # the runs decide the pooling
    except EncoderError as error:
        raise ReproduceError(f"--start: {error}") from error
    return recipe.prompt if recipe else ""
