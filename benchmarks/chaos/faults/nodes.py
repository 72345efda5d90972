"""Machines that fail, are about to be preempted, or join."""

import subprocess
import sys
import time

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.processes import struck
from benchmarks.chaos.run import ChaosError, Run, Snapshot

_DEADLINE_SECONDS = 30


def node_killed(run: Run) -> Snapshot:
    """Kill every process of a worker's node at once; a spare node is available."""
    assert run.nodes is not None
    node = run.nodes.holder(run.workers()[-1].pid)
    run.nodes.add()
    snapshot = run.snapshot()
    snapshot = struck(snapshot, time.time())
    run.nodes.remove(node)
    return snapshot


def preempted(run: Run) -> Snapshot:
    """Announce the preemption of a worker's node: a checkpoint within the deadline, then training without the node."""
    assert run.nodes is not None
    node = run.nodes.holder(run.workers()[-1].pid)
    run.nodes.add()
    before = run.newest_checkpoint()
    snapshot = run.snapshot()
    snapshot = struck(snapshot, time.time())
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", run.nodes.address),
            *("--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", "spot", "--deadline-remaining-seconds", str(_DEADLINE_SECONDS)),
        ],
        env=run.environment,
        check=True,
        capture_output=True,
    )
    run.wait_for("a checkpoint before the deadline", lambda: run.newest_checkpoint() != before, _DEADLINE_SECONDS)
    run.wait_for("workers elsewhere", lambda: run.snapshot().inode != snapshot.inode, 120)
    run.nodes.remove(node)
    return snapshot


def elastic(run: Run) -> Snapshot:
    """Change the world from 2 workers to 3, 1 and 2, as nodes join and die."""
    assert run.nodes is not None
    first = run.snapshot()
    for wanted in (3, 1, 2):
        snapshot = run.snapshot()
        if wanted > len(run.nodes.nodes):
            run.nodes.add(wanted - len(run.nodes.nodes))
        while wanted < len(run.nodes.nodes):
            run.nodes.remove(run.nodes.nodes[-1])
        try:
            run.wait_for(f"{wanted} workers", lambda at=wanted: len(run.workers()) == at, 180, every_seconds=1)
            run.wait_step(snapshot.step + 1, snapshot)
        except ChaosError as error:
            raise ChaosError(f"{error} (the world should have become {wanted})") from error
    return first


FAULTS = (
    Fault("node_killed", node_killed, "its node is gone", setting="cluster"),
    Fault("preemption_notice", preempted, "about to be removed", setting="cluster"),
    Fault("elastic_2_3_1_2", elastic, "its node is gone", setting="elastic"),
)
