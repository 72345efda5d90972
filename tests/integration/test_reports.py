"""Checkpoints that a run reports to Ray Train, as a trial of Tune shows them."""

from pathlib import Path

import pytest
import tinyruns as runs
from ray import tune
from ray.train.torch import TorchConfig, TorchTrainer

from declutr.trainer.driver.group import build_group
from declutr.trainer.driver.run import run_training
from declutr.trainer.setup.scaling import ScalingConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.usefixtures("session")
def test_tune_sees_the_checkpoints_of_a_run(data, finished, tmp_path):
    values = runs.finished_config(data, tmp_path / "run").model_dump(mode="json")

    def trial(settings):
        from declutr.trainer.setup.config import TrainConfig

        run_training(TrainConfig.model_validate(settings))

    trials = tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0)
    (result,) = tune.Tuner(trial, param_space=values, run_config=trials).fit()
    steps = runs.steps_of(tmp_path / "run")
    assert steps == runs.steps_of(finished / "run")
    assert result.error is None
    assert result.metrics["step"] == 8
    assert result.metrics["loss"] == steps[8]["loss"]
    assert (Path(result.metrics["checkpoint_path"]) / "state.json").is_file()
    assert result.checkpoint is None


@pytest.mark.usefixtures("session")
def test_rays_own_trainer_starts_the_workers(tmp_path):
    trainer = build_group(ScalingConfig(device="cpu"), "cpu", {}, "", tmp_path, "channel", {})
    assert type(trainer) is TorchTrainer
    assert isinstance(trainer.backend_config, TorchConfig)
    allocator = trainer.run_config.worker_runtime_env["env_vars"]["LD_PRELOAD"]
    assert Path(allocator).is_file(), "glibc's heap would grow with the steps"
