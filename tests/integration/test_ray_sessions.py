"""Any number of workers reads the same spans; sessions of Ray: Tune, a GPU that torch cannot use, nodes that go."""

import dataclasses
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import pytest
import ray
import tinyruns as runs
import torch
from messages import all_of
from metadataserver import metadata_server
from processes import until
from ray import tune
from ray.cluster_utils import Cluster
from ray.data import DataContext
from ray.train.torch import TorchConfig, TorchTrainer

from declutr.common.errors import ConfigError, TrainingFailedError
from declutr.common.storage import read_json
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.build import build_parts
from declutr.trainer.data import stream
from declutr.trainer.data.chunks import rank_plan
from declutr.trainer.data.packedbatch import DIGEST
from declutr.trainer.data.plan import Plan
from declutr.trainer.data.stream import Prefetcher, batches, documents
from declutr.trainer.driver.failure import GroupFailure, blame_node
from declutr.trainer.driver.group import build_group
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import DEVICE, RunPlan
from declutr.trainer.scaling import ScalingConfig
from declutr.trainer.train import run_training

pytestmark = pytest.mark.ray
STEPS = 40  # more than an epoch of 257 documents
BATCH = 8


SLOW_END = """
import time
from declutr.common.relay import end_at_signals
from declutr.common.session import start_ray
end_at_signals()
start_ray(1)
print("ready", flush=True)
try:
    time.sleep(60)
finally:
    time.sleep(4)
"""


def test_a_signal_ends_a_command_in_order_although_its_end_takes_seconds():
    with subprocess.Popen([sys.executable, "-c", SLOW_END], stdout=PIPE, stderr=PIPE, text=True) as command:
        assert command.stdout.readline() == "ready\n"
        command.terminate()
        assert "received" not in command.communicate(timeout=60)[1]  # Ray's own handler kills after 3 s
        assert command.returncode == 128 + signal.SIGTERM


def rank_plans(data, world, first=0, last=STEPS, chunk_steps=None):
    shards = ShardSet(data, "train")
    plan = Plan(seed=0, num_documents=shards.num_documents, batch_documents=BATCH)
    plans = [rank_plan(plan, shards, rank, world, first, last) for rank in range(world)]
    return [dataclasses.replace(p, chunk_steps=chunk_steps or p.chunk_steps) for p in plans]


def spans_of(batch):
    """Each span as (ids, masked places, their tokens): anchors first, then positives."""
    pieces = [batch.spans.span_slice(i, i + 1) for i in range(batch.spans.num_spans)]
    return [(p.input_ids.tolist(), p.selected.tolist(), p.labels.tolist()) for p in pieces]


def global_steps(data, collator, world, **sizes):
    """What all ranks together read at each step, through Ray Data, in the order of the global batch."""
    ranks = [list(Prefetcher(batches(p, collator, torch.device("cpu")))) for p in rank_plans(data, world, **sizes)]
    assert len({len(rank) for rank in ranks}) == 1
    steps = []
    for parts in zip(*ranks, strict=True):
        assert sum(part.num_rows for part in parts) == 2 * BATCH  # the anchors
        cut = [(spans_of(part), part.num_rows) for part in parts]
        anchors = [span for spans, first in cut for span in spans[:first]]
        digest = sum(part.spans.digest() for part in parts) % DIGEST
        steps.append((anchors, [span for spans, first in cut for span in spans[first:]], digest))
    return steps


@pytest.mark.nightly
@pytest.mark.usefixtures("session")
def test_nothing_spins_while_blocks_wait_for_their_reader(data, monkeypatch):
    looks, waiting = [], []

    class Looks(stream._Pace):
        def on_execution_step(self, executor):
            looks.append(time.monotonic())
            waiting.append(not executor._consumer_idling())

    context = DataContext.get_current()
    monkeypatch.setattr(context, "custom_execution_callback_classes", [Looks])
    (plan,) = rank_plans(data, 1, last=150, chunk_steps=1)
    steps = documents(plan)
    for _ in range(2):  # the first chunk needs no task, the second does
        next(steps)
    # Blocks that nobody reads. On a busy machine the processes that read them need a minute to start.
    until(lambda: sum(waiting[:-1]) >= 5, seconds=180)
    steps.close()
    pauses = [after - at for at, after, full in zip(looks, looks[1:], waiting, strict=False) if full]
    assert min(pauses) >= stream._PACE_SECONDS


@pytest.mark.usefixtures("session")
def test_every_world_reads_the_same_spans_at_every_step(data, finished, monkeypatch):
    run = RunPlan.of(runs.train_config(data, "unused"))
    collator = build_parts(run, Communicator(), torch.device("cpu")).collators[""]
    alone = global_steps(data, collator, 1)
    assert len(alone) == STEPS
    assert all(len(anchors) == 2 * BATCH and len(positives) == 4 * BATCH for anchors, positives, _ in alone)
    assert any(places for _, places, _ in alone[0][0]), "nothing is masked"
    digests = [line["batch_digest"] for line in runs.steps_of(finished / "run").values()]
    assert [digest for *_, digest in alone[:8]] == digests
    assert global_steps(data, collator, 2, chunk_steps=7) == alone
    monkeypatch.setattr("declutr.trainer.data.stream._MOST_CHUNKS", 3)  # several Datasets, one after the other
    assert global_steps(data, collator, 3, chunk_steps=11) == alone
    # begins at any step, with more ranks than documents
    assert global_steps(data, collator, BATCH + 1, first=30, last=36) == alone[30:36]


@pytest.mark.nightly
@pytest.mark.usefixtures("session")
def test_the_first_chunk_waits_for_no_task(data):
    @ray.remote(num_cpus=6)
    class Holder:
        """Has all of the session's CPUs."""

        def holds(self):
            return True

    holder = Holder.remote()
    assert ray.get(holder.holds.remote())
    (plan,) = rank_plans(data, 1, chunk_steps=5)
    steps = documents(plan)
    tables = [next(steps) for _ in range(5)]
    ray.kill(holder)
    tables += steps
    (plan,) = rank_plans(data, 1)
    expected = [table.column("id").to_pylist() for table in documents(plan)]
    assert len(expected) == STEPS
    assert [table.column("id").to_pylist() for table in tables] == expected


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_rays_own_trainer_starts_the_workers_and_tune_sees_the_checkpoints(data, finished, tmp_path):
    trainer = build_group(ScalingConfig(device="cpu"), tmp_path, {"device": "cpu"})
    assert type(trainer) is TorchTrainer
    assert isinstance(trainer.backend_config, TorchConfig)
    variables = trainer.run_config.worker_runtime_env["env_vars"]
    assert Path(variables["LD_PRELOAD"]).is_file(), "glibc's heap would grow with the steps"
    assert "dirty_decay_ms:-1" in variables["MALLOC_CONF"], "the kernel would clear freed pages again"
    values = runs.finished_config(data, tmp_path / "run").model_dump(mode="json")

    def trial(settings):
        from declutr.trainer.config import TrainConfig

        run_training(TrainConfig.model_validate(settings))

    trials = tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0)
    (result,) = tune.Tuner(trial, param_space=values, run_config=trials).fit()
    steps = runs.steps_of(tmp_path / "run")
    assert steps == runs.steps_of(finished / "run")
    assert (result.error, result.checkpoint) == (None, None)
    assert (result.metrics["step"], result.metrics["loss"]) == (8, steps[8]["loss"])
    assert (Path(result.metrics["checkpoint_path"]) / "state.json").is_file()


@pytest.fixture
def counted_gpu():
    ray.shutdown()
    ray.init("local", num_cpus=3, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.nightly
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
    assert run_training(config("cpu", num_workers=0))["steps"] == 6, "nothing was computed, so the user may change it"
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


@pytest.mark.nightly
@pytest.mark.slow
def test_a_notice_moves_the_run_to_another_node(cluster, data, finished, tmp_path, log):
    cluster, clouds = cluster
    clouds.action = b'{"action": "terminate", "time": "2100-01-01T00:00:00Z"}'
    scaling = {"address": cluster.address, "cpus_per_worker": 2, "spot_notices": "aws", "max_failures": 0}
    slow = {"microbatch_tokens": 16}  # else the run may be over before it is asked to save
    assert run_training(runs.finished_config(data, tmp_path / "run", scaling=scaling, **slow))["steps"] == 8
    assert any("spot host (terminate)" in line and "draining node" in line for line in log)
    assert any("to be removed" in line for line in log)
    (moved,) = [line for line in log if "starting again" in line]
    assert moved.startswith("saved at step ")
    assert clouds.asked.count("/latest/meta-data/spot/instance-action") >= 2
    lines, expected = runs.steps_of(tmp_path / "run"), runs.steps_of(finished / "run")
    assert lines.keys() == expected.keys()
    for step, line in expected.items():  # two threads a worker add up in another order than one
        assert lines[step]["batch_digest"] == line["batch_digest"]
        assert lines[step]["loss"] == pytest.approx(line["loss"], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_broken_exchange_names_the_node_that_is_gone(cluster):
    cluster, _ = cluster
    ray.init(cluster.address, log_to_driver=False)
    nodes = {node["NodeID"] for node in ray.nodes()}
    failure = GroupFailure("worker 0 lost the others", "death", "", collateral=True)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    wait = threading.Event().wait
    blamed = blame_node(failure, nodes, wait)
    assert "node is gone (host " in blamed.summary
    assert blamed.kind == failure.kind, "equal failures share it"
    for other in (GroupFailure("worker 0: ValueError", "ValueError", ""), blamed):
        assert blame_node(other, {"a"}, wait) == other
