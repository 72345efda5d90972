"""Hanging and slow workers whose devices work behind their processes, as with NCCL, and torch's flight recorder."""

import os
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import tinyruns as runs
import torch
from messages import says

from declutr.trainer.driver.watchdog import Watchdog
from declutr.trainer.step.step_metrics import StepMetrics
from declutr.trainer.worker.device_events import CudaEvent, HostEvent, events_of
from declutr.trainer.worker.heartbeat import Heartbeat
from declutr.trainer.worker.loop import Recorder

SIZE = 3


class Device:
    """The timeline of a device: queued work ends at a time, exchanges end when the last device has entered them."""

    def __init__(self, clock):
        self.clock, self.end = clock, 0.0

    def work(self, seconds):
        self.end += seconds

    def event(self):
        return Place(self.end, self.clock)


class Place:
    def __init__(self, at, clock):
        self.at, self.clock = at, clock

    def reached(self):
        return self.clock[0] >= self.at

    def wait(self):
        self.clock[0] = max(self.clock[0], self.at)

    def seconds_since(self, earlier):
        return self.at - earlier.at


def group(clock):
    devices = [Device(clock) for _ in range(SIZE)]
    heartbeats = [Heartbeat(rank, SIZE, "g", "n") for rank in range(SIZE)]
    for heartbeat, device in zip(heartbeats, devices, strict=True):
        heartbeat._event = device.event
    return devices, heartbeats


def queue_step(devices, heartbeats, seconds):
    """Every process queues a step of this length and an exchange at once; no process waits for its device."""
    for device, own in zip(devices, seconds, strict=True):
        device.work(own)
    with ExitStack() as exchanges:
        for heartbeat in heartbeats:
            exchanges.enter_context(heartbeat.exchange("update"))
        last = max(device.end for device in devices)
        for device in devices:
            device.end = last


def test_the_worker_whose_device_did_not_enter_the_exchange_hangs_although_all_processes_queued_it():
    clock = [0.0]
    devices, heartbeats = group(clock)
    for _ in range(4):
        queue_step(devices, heartbeats, [1.0] * SIZE)
    queue_step(devices, heartbeats, [1.0, 1.0, 10**9])
    for heartbeat in heartbeats:
        heartbeat.steps = 5
        heartbeat.flight = ["5 nccl:all_reduce ['Float'][[7]]: scheduled"]
    dog, hang = Watchdog(20.0, straggler_factor=2.0), None
    while hang is None and clock[0] < 100:
        clock[0] += 0.5
        hang = dog.look([heartbeat.snapshot() for heartbeat in heartbeats], clock[0])
    assert hang is not None
    assert hang.heartbeat["rank"] == 2
    assert [heartbeat.entered for heartbeat in heartbeats] == [5, 5, 4]
    assert clock[0] == pytest.approx(25, abs=1)
    says(hang.flight[-1], "worker 2", "exchange 5", "nccl:all_reduce")


def test_a_slow_device_is_told_apart_from_those_that_wait_for_it():
    clock = [0.0]
    devices, heartbeats = group(clock)
    dog, found = Watchdog(600.0, straggler_factor=2.0), []
    for step in range(1, 60):
        before = clock[0]
        queue_step(devices, heartbeats, [0.1, 0.5, 0.1])
        clock[0] = devices[0].end  # a process waits for its device once a step, for the loss
        for heartbeat in heartbeats:
            heartbeat.finish_step(step, clock[0] - before)
        dog.look([heartbeat.snapshot() for heartbeat in heartbeats], clock[0])
        found += dog.slow()
    assert [round(heartbeat.own_seconds, 3) for heartbeat in heartbeats] == [0.1, 0.5, 0.1]
    (line,) = found
    assert line.startswith("worker 1 ")
    says(line, "slow", "0.50 s", "0.10 s")


def test_every_exchange_is_counted_once_and_forgotten():
    clock = [0.0]
    devices, heartbeats = group(clock)
    for _ in range(50):
        queue_step(devices, heartbeats, [1.0] * SIZE)
        heartbeats[0].snapshot()
    clock[0] = 25.5
    assert heartbeats[0].snapshot()["entered"] == heartbeats[0].snapshot()["entered"] == 25
    clock[0] = 10**6
    assert heartbeats[0].snapshot()["entered"] == 50
    assert not heartbeats[0]._exchanges
    heartbeat = Heartbeat(0, 1)
    with pytest.raises(OSError, match="gone"), heartbeat.exchange("gather"):
        raise OSError("gone")
    assert heartbeat.snapshot()["entered"] == 1
    assert not heartbeat._exchanges


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("queued", "computed"), [(0.05, 0.004), (0.004, 0.04)])
def test_time_of_a_step_is_that_of_the_device(queued, computed, late):
    """Whether the process or its GPU is slower: a step before a validation once had 0.0002 s, and the next one two."""
    clock, found, update = [0.0], [], 0.01
    device = Device(clock)

    class Pending:
        def __init__(self, step):
            clock[0] += queued  # the GPU computes what it has while the process queues more
            device.end = max(device.end, clock[0]) + computed
            self.step, self.copied = step, device.event()
            device.work(update)

        def read(self):
            self.copied.wait()
            return StepMetrics({}, {}, 1.0, 1.0, 1, 100, 0.0, 1.0, 0)

    def event():
        device.end = max(device.end, clock[0])
        return device.event()

    config = SimpleNamespace(batch_documents=1)
    loop = SimpleNamespace(config=config, heartbeat=SimpleNamespace(line=None))
    loop.corpus_rows = loop.log_first_step = lambda *_: {}
    metrics = SimpleNamespace(step=lambda *given: found.append(given[2]["seconds"]))
    recorder = Recorder(loop, 1, SimpleNamespace(waited_seconds=0.0), metrics, None, event)
    for step in range(1, 13):
        taken, ended = [Pending(step)], event()
        recorder.settle()
        recorder.hold(taken, ended, None)
        if step % 4 == 0 or not late:
            recorder.settle()
            clock[0] += 7.0  # a validation
        recorder.proceed()
    whole = computed + update
    assert found == pytest.approx([max(queued, whole) if late else queued + whole] * 12, abs=0.02)
    assert max(found[1:3] + found[5:7]) - min(found[1:3] + found[5:7]) < 1e-9


def test_events_of_a_device_are_its_own_kind():
    assert events_of(torch.device("cpu")) is HostEvent
    assert events_of(torch.device("cuda", 0)) is CudaEvent
    first, second = HostEvent(), HostEvent()
    assert first.reached()
    assert second.seconds_since(first) >= 0


RANK = """
import os, sys, time
from datetime import timedelta
from declutr.trainer.worker.backend import newest_exchanges, record_exchanges
record_exchanges()
import torch, torch.distributed as dist
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
for number in range(1, 5):
    dist.all_reduce(torch.ones(number, 2))
if rank == 0:
    pending = dist.all_reduce(torch.ones(7), async_op=True)
    print("\\n".join(newest_exchanges(2)), flush=True)
    store.set("seen", "1")
    pending.wait()
else:
    store.wait(["seen"], timedelta(seconds=60))
    print("\\n".join(newest_exchanges(2)), flush=True)
    dist.all_reduce(torch.ones(7))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_flight_recorder_names_the_exchange_that_a_rank_did_not_enter(tmp_path):
    command = [sys.executable, "-c", RANK]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": runs.ROOT}
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **options) for rank in range(2)]
    (first, wrong), (second, wrong2) = [process.communicate(timeout=150) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], wrong + wrong2
    assert first.splitlines()[0].startswith("4 gloo:all_reduce ['Float'][[4, 2]]: ")
    assert first.splitlines()[1].startswith("5 gloo:all_reduce ['Float'][[7]]: ")
    assert "ended" not in first.splitlines()[1]
    assert [line.split()[0] for line in second.splitlines()] == ["3", "4"]


@pytest.mark.slow
def test_prepare_sets_the_allocator_before_a_gpu_is_used():
    code = "import os, torch; from declutr.trainer.worker.backend import _prepare; _prepare(); " + (
        "print(os.environ['PYTORCH_ALLOC_CONF'], torch.cuda.is_initialized())"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=runs.ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["expandable_segments:True", "False"], done.stderr
