"""The device of a run: chosen once, kept, and changed by nothing but a new run."""

import pytest
import tinyruns as runs
import torch
from madeup import config_of, shards
from messages import says

from declutr.common.storage import DamagedError, read_json
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, checkpoint_path
from declutr.trainer.driver.checks import ray_problems
from declutr.trainer.driver.device import DEVICE, choose_device, device_problem, kept_device, recorded_device
from declutr.trainer.driver.failure import TrainingFailedError
from declutr.trainer.driver.run import run_training
from declutr.trainer.setup.scaling import ScalingConfig
from declutr.trainer.step.step import TrainStep

TWO_GPUS = {"CPU": 8.0, "GPU": 2.0}
NO_GPU = {"CPU": 8.0}


def choose(run, resources, **scaling):
    return choose_device(ScalingConfig(**scaling), run, None, resources)


def with_checkpoint(run):
    folder = checkpoint_path(run / CHECKPOINTS, 3)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    return run


@pytest.mark.parametrize(
    ("workers", "device"), [(1, "cuda"), (2, "cuda"), (3, "cpu"), ((2, 5), "cuda"), ((3, 5), "cpu")]
)
def test_auto_takes_gpus_if_there_is_one_for_every_worker(tmp_path, log, workers, device):
    assert choose(tmp_path, TWO_GPUS, num_workers=workers) == device
    assert read_json(tmp_path / DEVICE) == {"device": device}
    (line,) = log
    says(line, device, "scaling.device = auto", "2 GPU(s)")


@pytest.mark.parametrize(("first", "later"), [(TWO_GPUS, NO_GPU), (NO_GPU, TWO_GPUS)])
@pytest.mark.parametrize("trained", [False, True])
def test_chosen_device_stays_when_gpus_come_and_go(tmp_path, log, first, later, trained):
    device = choose(tmp_path, first)
    if trained:
        with_checkpoint(tmp_path)
    assert choose(tmp_path, later) == device == recorded_device(tmp_path)
    assert len(log) == 1
    assert device_problem(ScalingConfig(), tmp_path) is None


def test_another_device_is_refused_once_there_is_a_checkpoint(tmp_path, log):
    assert choose(tmp_path, TWO_GPUS, device="cpu") == "cpu"
    assert device_problem(ScalingConfig(device="cuda"), tmp_path) is None, "nothing was computed yet"
    assert choose(tmp_path, NO_GPU, device="cuda") == "cuda" == recorded_device(tmp_path)
    assert len(log) == 2
    with_checkpoint(tmp_path)
    assert device_problem(ScalingConfig(device="cuda"), tmp_path) is None
    told = device_problem(ScalingConfig(device="cpu"), tmp_path)
    says(told, "scaling.device = cpu", "started on cuda")
    says(told, "cuda or auto")
    assert "--fork NEW_RUN" in told
    assert kept_device(ScalingConfig(device="cpu"), tmp_path) == "cuda"


def test_a_run_on_gpus_does_not_continue_on_a_machine_without(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    choose(tmp_path, {"CPU": 8.0, "GPU": 99.0}, num_workers=99)
    with_checkpoint(tmp_path)
    config = runs.train_config("data", tmp_path, scaling={"num_workers": 99, "device": "auto"})
    (problem,) = ray_problems(config, tmp_path, own_session=True)
    says(problem, "started on GPUs")
    says(problem, "99 workers", "GPU")


@pytest.mark.parametrize("recorded", [False, True])
def test_a_run_without_ray_on_gpus_is_refused_on_a_machine_without(tmp_path, recorded):
    if recorded:
        choose(tmp_path, TWO_GPUS)
    device = "auto" if recorded else "cuda"
    config = runs.train_config("data", tmp_path, scaling={"num_workers": 0, "device": device})
    (problem,) = ray_problems(config, tmp_path, own_session=True)
    says(problem, f"scaling.device = {device}", "GPU", "this machine has 0")


@pytest.mark.parametrize("content", ["", "[]", '{"device": "tpu"}', '{"dev'])
def test_a_damaged_record_is_named_with_its_remedy(tmp_path, content):
    (tmp_path / DEVICE).write_text(content)
    problem = device_problem(ScalingConfig(), tmp_path)
    assert f"{DEVICE} is damaged" in problem
    assert 'write {"device": "cuda"}' in problem
    with pytest.raises(DamagedError):
        choose(tmp_path, TWO_GPUS)


def test_an_operation_that_cannot_repeat_its_bits_ends_the_run_with_the_setting(tmp_path, monkeypatch):
    """It refuses on a CPU as others do on a GPU, where a worker asks for algorithms that repeat their bits."""

    def refused(*_):
        torch.use_deterministic_algorithms(True)
        torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))

    monkeypatch.setattr(TrainStep, "gradients", refused)
    config = config_of(shards(tmp_path / "data"), tmp_path / "run", scaling={"num_workers": 0})
    with pytest.raises(TrainingFailedError, match=r"^put_ does not have .* scaling\.deterministic=false"):
        run_training(config)
    assert not torch.are_deterministic_algorithms_enabled()


def test_bits_for_any_number_of_workers_need_those_of_one():
    with pytest.raises(ValueError, match=r"elastic_determinism.* needs deterministic"):
        ScalingConfig(elastic_determinism=True, deterministic=False)
