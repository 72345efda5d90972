"""The device of a run, and workers whose devices work behind their processes, as with NCCL."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tinyruns as runs
import torch
from groups import run_group
from madeup import config_of, save, shards
from messages import says
from processes import run_python
from pydantic import ValidationError
from tiny import documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step

from declutr.common.errors import DamagedError, TrainingFailedError, UsageError
from declutr.common.storage import read_json
from declutr.trainer.build import allows_amx
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, checkpoint_path
from declutr.trainer.driver.continuation import choose_device, device_problem, kept_device, ray_problems
from declutr.trainer.objectives.config import RunContext, SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.objective import Declutr
from declutr.trainer.run import DEVICE, kept_precision, recorded_device
from declutr.trainer.scaling import ScalingConfig
from declutr.trainer.step.step import StepMetrics, TrainStep
from declutr.trainer.train import run_training
from declutr.trainer.worker.device import DeviceEvent, agree_precision, refusal, set_up_torch
from declutr.trainer.worker.loop import Recorder

TWO_GPUS = {"CPU": 8.0, "GPU": 2.0}
NO_GPU = {"CPU": 8.0}
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


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


def test_elastic_determinism_is_for_cpus(tmp_path):
    settings = {"elastic_determinism": True, "num_workers": 2}
    with pytest.raises(UsageError, match=r"elastic_determinism.*GPUs.*device=cpu"):
        choose(tmp_path, TWO_GPUS, **settings)
    assert recorded_device(tmp_path) is None
    assert choose(tmp_path, NO_GPU, **settings) == choose(tmp_path, TWO_GPUS, **settings) == "cpu", "the run keeps it"
    with pytest.raises(ValidationError, match="elastic_determinism = true: its sums"):
        ScalingConfig(device="cuda", **settings)


@pytest.mark.parametrize(("first", "later"), [(TWO_GPUS, NO_GPU), (NO_GPU, TWO_GPUS)])
@pytest.mark.parametrize("trained", [False, True])
def test_chosen_device_stays_when_gpus_come_and_go(tmp_path, log, first, later, trained):
    device = choose(tmp_path, first)
    if trained:
        with_checkpoint(tmp_path)
    assert choose(tmp_path, later) == device == recorded_device(tmp_path).device
    assert len(log) == 1
    assert device_problem(ScalingConfig(), tmp_path) is None


def test_another_device_is_refused_once_there_is_a_checkpoint(tmp_path, log):
    assert choose(tmp_path, TWO_GPUS, device="cpu") == "cpu"
    assert device_problem(ScalingConfig(device="cuda"), tmp_path) is None, "nothing was computed yet"
    assert choose(tmp_path, NO_GPU, device="cuda") == "cuda" == recorded_device(tmp_path).device
    assert len(log) == 2
    with_checkpoint(tmp_path)
    assert device_problem(ScalingConfig(device="cuda"), tmp_path) is None
    told = device_problem(ScalingConfig(device="cpu"), tmp_path)
    says(told, "scaling.device = cpu", "started on cuda")
    says(told, "cuda or auto")
    assert "encoder.pretrained=" in told
    assert kept_device(ScalingConfig(device="cpu"), tmp_path) == "cuda"


@pytest.mark.parametrize(
    ("scaling", "recorded", "parts"),
    [
        ({"device": "cuda", "num_workers": 99}, False, ("scaling.device = cuda", "99 workers", "GPU")),
        ({"num_workers": 99}, True, ("started on GPUs", "99 workers", "GPU")),
        ({"num_workers": 99}, False, ()),
        ({"device": "cuda", "num_workers": 0}, False, ("scaling.device = cuda", "GPU", "this machine has 0")),
        ({"num_workers": 0}, True, ("scaling.device = auto", "GPU", "this machine has 0")),
        ({"address": "127.0.0.1:2"}, False, ("scaling.address = 127.0.0.1:2", "no Ray cluster")),
        ({}, False, ("RAY_ADDRESS = 127.0.0.1:1", "no Ray cluster")),
    ],
)
def test_a_start_without_its_gpus_or_cluster_is_refused(tmp_path, monkeypatch, scaling, recorded, parts):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if "RAY_ADDRESS" in " ".join(parts):
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    if recorded:
        choose(tmp_path, {"CPU": 8.0, "GPU": 99.0}, num_workers=99)
        with_checkpoint(tmp_path)
    problems = ray_problems(ScalingConfig(**scaling), tmp_path, own_session=True)
    assert len(problems) == bool(parts)
    says("".join(problems), *parts)
    (tmp_path / "summary.json").write_text("{}")
    assert ray_problems(ScalingConfig(**scaling), tmp_path, own_session=True) == [], "a finished run needs none"


@pytest.mark.parametrize("content", ["", "[]", '{"device": "tpu"}', '{"dev'])
def test_a_damaged_record_is_named_with_its_remedy(tmp_path, content):
    (tmp_path / DEVICE).write_text(content)
    problem = device_problem(ScalingConfig(), tmp_path)
    assert f"{DEVICE} is damaged" in problem
    assert 'write {"device": "cuda"}' in problem
    with pytest.raises(DamagedError):
        choose(tmp_path, TWO_GPUS)


def agree(comm, folder, setting, able):
    return agree_precision(setting, Path(folder), torch.device("cpu"), able[comm.rank], comm)


@pytest.mark.dist
def test_workers_agree_on_one_precision_and_the_run_keeps_it(tmp_path):
    def agreed(setting, *able):
        (precision,) = set(run_group(2, agree, str(tmp_path), setting, able))
        return precision

    assert agreed("auto", True, False) == agreed("auto", False, True) == "fp32"
    assert read_json(tmp_path / DEVICE) == {"device": "cpu", "precision": "fp32"}
    assert agreed("auto", True, True) == "bf16", "a run without a checkpoint chooses again"
    with_checkpoint(tmp_path)
    assert agreed("auto", False, True) == agreed("auto", False, False) == "bf16"
    assert agreed("fp32", True, True) == "fp32"
    assert read_json(tmp_path / DEVICE) == {"device": "cpu", "precision": "bf16"}


def test_a_run_computes_in_its_recorded_precision_where_that_is_slow_and_says_so(tmp_path, log):
    config = config_of(shards(tmp_path / "data"), tmp_path / "run", scaling={"num_workers": 0}, precision="auto")
    losses = []
    for precision in ("fp32", "bf16"):
        save(config, tmp_path / "run", step=1)
        choose(tmp_path / "run", NO_GPU)
        (tmp_path / "run" / DEVICE).write_text(json.dumps({"device": "cpu", "precision": precision}))
        assert kept_precision("auto", tmp_path / "run") == precision
        run_training(config)
        losses.append([line["loss"] for line in runs.steps_of(tmp_path / "run").values()])
        shutil.rmtree(tmp_path / "run")
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert losses[0] != losses[1]
    assert ["has no units" in line for line in log].count(True) == 1


@pytest.mark.parametrize(
    ("most", "allowed"),
    [("AVX512_CORE_BF16", False), ("avx2", False), ("AVX512_CORE_AMX", True), ("default", True), ("ALL", True)],
)
def test_amx_is_left_out_where_onednn_leaves_it_out(most, allowed):
    assert allows_amx(most) == allowed


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


@pytest.fixture
def torch_as_before(monkeypatch):
    """Settings of torch and the variable of cuBLAS, restored at the end."""
    monkeypatch.setenv(CUBLAS, ":4096:8")
    precision = torch.get_float32_matmul_precision()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.usefixtures("torch_as_before")
def test_a_process_on_a_gpu_repeats_its_bits(tmp_path, monkeypatch, log, deterministic):
    monkeypatch.setenv(CUBLAS, ":4096:2:16:8")
    config = runs.train_config("data", tmp_path, precision="bf16", scaling={"deterministic": deterministic})
    set_up_torch(config.scaling, config.precision, torch.device("cuda"))
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.get_float32_matmul_precision() == "high"
    assert os.environ[CUBLAS] == (":4096:8" if deterministic else ":4096:2:16:8")
    assert [CUBLAS in line for line in log] == [True] * deterministic
    set_up_torch(config.scaling, config.precision, torch.device("cuda"))
    assert len(log) == deterministic


def test_a_gpu_that_was_used_before_without_cublas_variable_is_told_apart():
    told = refusal(RuntimeError(
        "Deterministic behavior was enabled with `torch.use_deterministic_algorithms(True)`, but this operation is not "
        "deterministic because it uses CuBLAS and you have CUDA >= 10.2."
    ))  # fmt: skip
    says(told, f"{CUBLAS}=:4096:8", "start anew", "scaling.deterministic=false")
    assert refusal(RuntimeError("CUDA error: out of memory")) is None
    code = "import os, declutr; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    assert run_python("-c", code, env={CUBLAS: None}).stdout == ":4096:8\n"


class Noting(Declutr):
    """Notes how float32 products are computed in its loss."""

    def terms(self, gathered):
        self.noted = torch.get_float32_matmul_precision()
        return super().terms(gathered)


@pytest.mark.usefixtures("torch_as_before")
def test_scores_of_the_loss_are_products_in_float32():
    torch.set_float32_matmul_precision("high")
    encoder = tiny_encoder(dtype=torch.float32)
    objective = Noting(DeclutrConfig(), RunContext(spans=SpanConfig(num_anchors=2, num_positives=2)), 32)
    train_step = tiny_train_step(encoder, loss=objective)
    train_step.gradients({"": rank_batch(tiny_collator(), documents([200] * 2, 12))}, 1)
    assert objective.noted == "highest"
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize(("deterministic", "algorithm"), [(True, "Ring"), (False, None)])
def test_sums_over_gpus_go_around_a_ring_where_bits_repeat(deterministic, algorithm):
    code = f"import os; from declutr.trainer.worker import backend; backend._prepare({deterministic}); "
    done = run_python("-c", f"{code}print(os.environ.get('NCCL_ALGO'))", env={"NCCL_ALGO": None})
    assert done.stdout == f"{algorithm}\n"


@pytest.mark.parametrize("queue_size", [0, 8])
def test_a_warm_up_leaves_nothing(queue_size):
    """The kernels of a process are chosen for the first batch of the run, whichever step follows."""
    first, second = (rank_batch(tiny_collator(), documents([200] * 4, 12, seed=seed)) for seed in (0, 1))
    ends = []
    for warm in (False, True):
        train_step = tiny_train_step(tiny_encoder(dropout=0.1), DeclutrConfig(queue_size=queue_size))
        if warm:
            train_step.warm_up({"": first})
            assert all(parameter.grad is None for parameter in train_step.encoder.parameters())
        metrics = train_step.step({"": second}, 2)
        ends.append((metrics, [p.detach().clone() for p in train_step.encoder.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


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

    def wait(self):
        self.clock[0] = max(self.clock[0], self.at)

    def seconds_since(self, earlier):
        return self.at - earlier.at


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
    metrics = SimpleNamespace(add=lambda *given: found.append(given[2]["seconds"]))
    recorder = Recorder(loop, 1, SimpleNamespace(waited_seconds=0.0), metrics, None, event)
    for step in range(1, 13):
        taken, ended = [Pending(step)], event()
        recorder.flush_pending()
        recorder.add(taken, ended)
        if step % 4 == 0 or not late:
            recorder.flush_pending()
            clock[0] += 7.0  # a validation
        recorder.restart_clock()
    whole = computed + update
    assert found == pytest.approx([max(queued, whole) if late else queued + whole] * 12, abs=0.02)
    assert max(found[1:3] + found[5:7]) - min(found[1:3] + found[5:7]) < 1e-9


def test_events_of_a_processor_are_of_its_clock():
    first, second = DeviceEvent(torch.device("cpu")), DeviceEvent(torch.device("cpu"))
    first.wait()
    assert second.seconds_since(first) >= 0
