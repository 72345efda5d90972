"""What a checkpoint says of its run, where a test decides nothing but its step and scores."""

from declutr.trainer.checkpoints.state import RunState


def state_of(step, **scores):
    return RunState(step=step, documents=step, world_size=1, config_hash="c", data_hash="d", scores=scores, files={})
