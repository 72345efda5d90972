"""The `validation.score` of a run that started before the setting's default changed (decision 19)."""

from pathlib import Path

from common.storage import read_json
from trainer.checkpoints.checkpoint import CHECKPOINTS, states_in
from trainer.setup.config import TrainConfig
from trainer.setup.geometry import DECISIVE

_FORMER = "recall_at_1"


def with_original_score(config: TrainConfig, run: Path) -> TrainConfig:
    """The configuration with its run's original `validation.score`, unless the user sets one.

    `recall_at_1` was the default once. A run that started with it keeps it: its old checkpoints have no other score.
    """
    if "score" in config.validation.model_fields_set:
        return config
    former = config.model_copy(update={"validation": config.validation.model_copy(update={"score": _FORMER})})
    try:
        began = read_json(run / DECISIVE)["validation"]["score"] == _FORMER
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: look into the checkpoints
        began = former.hash() in {state.config_hash for _, state in states_in(run / CHECKPOINTS)}
    return former if began else config
