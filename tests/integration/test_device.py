"""A run where Ray counts a GPU that torch cannot use: it stops with the reason and is not moved to CPUs."""

import pytest
import ray
import tinyruns as runs
import torch
from messages import all_of

from declutr.common.errors import ConfigError, TrainingFailedError
from declutr.common.storage import read_json
from declutr.trainer.driver.device import DEVICE
from declutr.trainer.driver.run import run_training

pytestmark = [pytest.mark.ray, pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")]


@pytest.fixture
def counted_gpu():
    ray.shutdown()
    ray.init(num_cpus=3, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("counted_gpu")
def test_a_gpu_that_fails_stops_the_run_and_never_moves_it(data, tmp_path, log):
    run = tmp_path / "run"

    def config(device, **scaling):
        scaling |= {"device": device, "max_repeated_failures": 1}
        return runs.train_config(data, run, scaling=scaling, checkpoint={"every_steps": 2})

    with pytest.raises(TrainingFailedError, match=all_of("GPUs", "torch", "host")):
        run_training(config("auto"))
    assert read_json(run / DEVICE) == {"device": "cuda"}
    assert not (run / "metrics.jsonl").exists()
    assert run_training(config("cpu", num_workers=0))["steps"] == 6, (
        "nothing had been computed, so the user may change it"
    )
    assert read_json(run / DEVICE) == {"device": "cpu"}
    assert any("scaling.device = cpu" in line for line in log)
    (run / "summary.json").unlink()
    with pytest.raises(ConfigError, match=all_of("scaling.device = cuda", "started on cpu", "encoder.pretrained=")):
        run_training(config("cuda"))
