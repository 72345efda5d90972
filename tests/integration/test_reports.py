"""Reports of a run to Ray Train, as a trial of Tune shows them."""

import pytest
import tinyruns as runs
from ray import tune

from trainer.driver.run import run_training

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.usefixtures("session")
def test_tune_sees_the_metrics_of_a_run_that_reports(data, finished, tmp_path):
    values = runs.finished_config(data, tmp_path / "run", scaling={"report_minutes": 1e-6}).model_dump(mode="json")

    def trial(settings):
        from trainer.setup.config import TrainConfig

        run_training(TrainConfig.model_validate(settings))

    trials = tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0)
    (result,) = tune.Tuner(trial, param_space=values, run_config=trials).fit()
    steps = runs.steps_of(tmp_path / "run")
    assert steps == runs.steps_of(finished / "run")
    assert result.error is None
    assert result.metrics["step"] in steps
    assert result.metrics["loss"] == steps[result.metrics["step"]]["loss"]
    assert result.checkpoint is None
