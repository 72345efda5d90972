"""A spot notice on one of two nodes: the run saves, and continues on the other node, with the same steps."""

import pytest
import ray
import tinyruns as runs
from metadataserver import metadata_server
from ray.cluster_utils import Cluster

from declutr.trainer.driver.run import run_training

pytestmark = [pytest.mark.ray, pytest.mark.slow]


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
