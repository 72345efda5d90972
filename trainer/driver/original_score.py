"""The configuration of a run that began when the default of `validation.score` was another one (decision 19)."""

from pathlib import Path

from common.storage import read_json
from trainer.checkpoints.checkpoint import CHECKPOINTS, states_in
from trainer.driver.checks import DECISIVE
from trainer.setup.config import TrainConfig

_FORMER = "recall_at_1"


def with_original_score(config: TrainConfig, run: Path) -> TrainConfig:
    """The configuration with the `validation.score` that its run began with, where the user names none.

    `recall_at_1` was the default once. A run that began with it keeps it: its earlier checkpoints have no other score.
    """
    if "score" in config.validation.model_fields_set:
        return config
    former = config.model_copy(update={"validation": config.validation.model_copy(update={"score": _FORMER})})
    try:
        began = read_json(run / DECISIVE)["validation"]["score"] == _FORMER
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: then the checkpoints tell
        began = former.hash() in _hashes(run)
    return former if began else config


def _hashes(run: Path) -> set[str]:
    """Hashes of the configurations of a run's checkpoints."""
    return {state.config_hash for _, state in states_in(run / CHECKPOINTS)}
