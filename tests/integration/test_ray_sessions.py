"""Sessions of Ray: Tune, a GPU that torch cannot use, and a spot notice on one of two nodes."""

import threading
from pathlib import Path

import pytest
import ray
import tinyruns as runs
import torch
from messages import all_of
from metadataserver import metadata_server
from ray import tune
from ray.cluster_utils import Cluster
from ray.train.torch import TorchConfig, TorchTrainer

from declutr.common.errors import ConfigError, TrainingFailedError
from declutr.common.storage import read_json
from declutr.trainer.driver.failure import GroupFailure, blame_node
from declutr.trainer.driver.group import build_group
from declutr.trainer.run import DEVICE
from declutr.trainer.scaling import ScalingConfig
from declutr.trainer.train import run_training

pytestmark = [pytest.mark.ray, pytest.mark.nightly]


@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_tune_sees_the_checkpoints_of_a_run(data, finished, tmp_path):
    values = runs.finished_config(data, tmp_path / "run").model_dump(mode="json")

    def trial(settings):
        from declutr.trainer.config import TrainConfig

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


@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_rays_own_trainer_starts_the_workers(tmp_path):
    trainer = build_group(ScalingConfig(device="cpu"), tmp_path, {"device": "cpu"})
    assert type(trainer) is TorchTrainer
    assert isinstance(trainer.backend_config, TorchConfig)
    allocator = trainer.run_config.worker_runtime_env["env_vars"]["LD_PRELOAD"]
    assert Path(allocator).is_file(), "glibc's heap would grow with the steps"


@pytest.fixture
def counted_gpu():
    ray.shutdown()
    ray.init("local", num_cpus=3, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
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
    assert read_json(run / DEVICE) == {"device": "cpu", "precision": "fp32"}
    assert any("scaling.device = cpu" in line for line in log)
    (run / "summary.json").unlink()
    with pytest.raises(ConfigError, match=all_of("scaling.device = cuda", "started on cpu", "encoder.pretrained=")):
        run_training(config("cuda"))


@pytest.fixture
def cluster(monkeypatch):
    """A head where no worker has room, and two nodes that ask the same metadata server."""
    ray.shutdown()
    with metadata_server() as clouds:
        clouds.once = True
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{clouds.host}")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        try:
            yield cluster, clouds
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.mark.slow
def test_a_notice_moves_the_run_to_another_node(cluster, data, finished, tmp_path, log):
    cluster, clouds = cluster
    clouds.action = b'{"action": "terminate", "time": "2100-01-01T00:00:00Z"}'
    scaling = {"address": cluster.address, "cpus_per_worker": 2, "spot_notices": "aws", "max_failures": 0}
    assert run_training(runs.finished_config(data, tmp_path / "run", scaling=scaling))["steps"] == 8
    assert any("spot host (terminate)" in line and "draining node" in line for line in log)
    assert any("to be removed" in line for line in log)
    (moved,) = [line for line in log if "starting again" in line]
    assert moved.startswith("saved at step ")
    assert clouds.asked.count("/latest/meta-data/spot/instance-action") >= 2
    found, expected = runs.steps_of(tmp_path / "run"), runs.steps_of(finished / "run")
    for step, line in expected.items():  # two threads a worker add up in another order than one
        assert found[step]["batch_digest"] == line["batch_digest"]
        assert found[step]["loss"] == pytest.approx(line["loss"], rel=1e-5)
    assert found.keys() == expected.keys()


@pytest.mark.slow
def test_a_broken_exchange_names_the_node_that_is_gone(cluster):
    cluster, _ = cluster
    ray.init(cluster.address, log_to_driver=False)
    nodes = {node["NodeID"] for node in ray.nodes()}
    failure = GroupFailure("worker 0 lost the others", "death", "", collateral=True)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    wait = threading.Event().wait
    named = blame_node(failure, nodes, wait)
    assert "node is gone (host " in named.summary
    assert named.kind == failure.kind, "equal failures share it"
    for other in (GroupFailure("worker 0: ValueError", "ValueError", ""), named):
        assert blame_node(other, {"a"}, wait) == other
