"""A real Ray cluster of two nodes: every check of the doctor once, a node's own disk and settings, a node that dies."""

import time

import pytest
import ray
import tinyruns as runs
from messages import says
from ray.cluster_utils import Cluster

from declutr.doctor import examination, storage
from declutr.doctor.cluster import ANSWER_SECONDS, Examiners, nodes_of_cluster
from declutr.doctor.finding import counts
from declutr.trainer.driver.failure import GroupFailure, blame_nodes
from declutr.trainer.worker.heartbeat import Heartbeat

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def disks(tmp_path_factory):
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def cluster(disks):
    """Two nodes that were started with different environments; one is told another disk."""
    for name in ("one", "two"):
        (disks / name).mkdir()
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "env_vars": {"DECLUTR_DISK": str(disks / "one")}},
    )
    made.add_node(num_cpus=1, env_vars={"DECLUTR_DISK": str(disks / "two"), "NCCL_DEBUG": "INFO"})
    yield made
    ray.shutdown()
    made.shutdown()


def test_examine_of_two_nodes_runs_every_check(cluster, disks):
    """One folder that both see, and one that is another disk on each."""
    config = runs.train_config(disks / "nothing", disks / "run", scaling={"num_workers": 4, "data_cpus": 1})
    found = examination.examine(config, cluster.address, ["$DECLUTR_DISK"])
    by_name = {finding.name: finding for finding in found}
    status = {name: finding.status for name, finding in by_name.items()}
    assert status["nodes"] == status["nodes reach each other"] == status["all-reduce (gloo)"] == "ok"
    assert by_name["all-reduce (gloo)"].value.startswith("2 processes")
    assert status[f"{disks}/run shared"] == "ok"
    says(by_name[f"{disks}/run shared"].value, "all 2 nodes")
    assert status["$DECLUTR_DISK shared"] == "FAIL"
    assert by_name["$DECLUTR_DISK shared"].value.count("does not see") == 2
    assert status["token authentication"] == "FAIL"
    assert status["clock"] == "ok"
    assert (status["NCCL_DEBUG"], status["version of code"]) == ("warn", "ok")
    assert sum(finding.name == "memory" for finding in found) == 2
    assert status[f"{disks}/nothing readable"] == status["configuration"] == "FAIL"
    assert not any(finding.name.startswith("answers") for finding in found)
    assert counts(found)["FAIL"] >= 5
    assert list((disks / "one").iterdir()) == list((disks / "two").iterdir()) == []


def test_a_node_that_does_not_answer_is_named(cluster, disks):
    """Busy, not dead: the other is examined all the same."""
    assert cluster.address
    nodes, _ = nodes_of_cluster()
    examiners = Examiners(nodes, seconds=ANSWER_SECONDS)
    try:
        assert len(examiners.ask("clock", lambda _, actor: actor.call.remote(time.time))) == 2
        examiners.seconds = 2.0
        stuck = nodes[1].name
        ask = {stuck: lambda actor: actor.call.remote(storage.seen, str(disks), "mark", ["nobody"])}  # looks for 10 s
        answers = examiners.ask("x", lambda node, actor: ask.get(node, lambda a: a.call.remote(time.time))(actor))
        assert list(answers) == [nodes[0].name] == examiners.names()
        (finding,) = examiners.findings
        assert (finding.node, finding.status) == (stuck, "FAIL")
        says(finding.value, "no answer", "2 s")
    finally:
        examiners.close()


def test_a_death_is_put_down_to_a_node_that_is_gone(cluster):
    """At once: Ray itself calls it alive for some seconds more."""
    head, other = (node.node_id for node in (cluster.head_node, *cluster.worker_nodes))
    heartbeats = [Heartbeat(rank, 2, node=node).snapshot() for rank, node in enumerate((head, other))]
    death, error = (
        GroupFailure("worker 1 died", "death", "account"),
        GroupFailure("worker 1: OSError", "OSError", "account"),
    )
    assert blame_nodes(death, heartbeats) == death
    cluster.remove_node(*cluster.worker_nodes, allow_graceful=False)
    blamed = blame_nodes(death, heartbeats)
    says(blamed.summary, "worker 1", f"host {heartbeats[1]['host']}", f"pid {heartbeats[1]['pid']}", "died", "node")
    assert (blamed.kind, blamed.account) == ("death", "account")
    assert blame_nodes(error, heartbeats) == error
