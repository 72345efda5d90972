"""The device of a run, and workers whose devices work behind their processes, as with NCCL."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

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
from declutr.trainer.build import allows_bf16
from declutr.trainer.driver.continuation import choose_device, device_problem, kept_device, ray_problems
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.objective import Declutr
from declutr.trainer.run import DEVICE, kept_precision, recorded_device
from declutr.trainer.scaling import ScalingConfig
from declutr.trainer.step.step import StepMetrics, TrainStep
from declutr.trainer.train import run_training
from declutr.trainer.worker import backend
from declutr.trainer.worker.device import DeviceEvent, agree_precision, refusal, set_up_torch
from declutr.trainer.worker.loop import Recorder

TWO_GPUS = {"CPU": 8.0, "GPU": 2.0}
NO_GPU = {"CPU": 8.0}
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def choose(run, resources, **scaling):
    return choose_device(ScalingConfig(**scaling), run, None, resources)


def with_checkpoint(run):
    folder = run / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    return run


@pytest.mark.parametrize(("workers", "device"), [(2, "cuda"), (3, "cpu"), ((2, 5), "cuda"), ((3, 5), "cpu")])
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
def test_chosen_device_stays_when_gpus_come_and_go(tmp_path, log, first, later):
    device = choose(tmp_path, first)
    for prepare in (Path, with_checkpoint):  # before its first checkpoint too
        assert choose(prepare(tmp_path), later) == device == recorded_device(tmp_path).device
        assert len(log) == 1
        assert device_problem(ScalingConfig(), tmp_path) is None


def test_another_device_and_a_damaged_record_are_refused_once_there_is_a_checkpoint(tmp_path, log):
    assert choose(tmp_path, TWO_GPUS, device="cpu") == "cpu"
    assert device_problem(ScalingConfig(device="cuda"), tmp_path) is None, "nothing was computed yet"
    assert choose(tmp_path, NO_GPU, device="cuda") == "cuda" == recorded_device(tmp_path).device
    assert len(log) == 2
    with_checkpoint(tmp_path)
    assert device_problem(ScalingConfig(device="cuda"), tmp_path) is None
    problem = device_problem(ScalingConfig(device="cpu"), tmp_path)
    says(problem, "scaling.device = cpu", "started on cuda")
    says(problem, "cuda or auto")
    assert f"encoder.from_config=null encoder.pretrained={tmp_path}/export" in problem
    assert kept_device(ScalingConfig(device="cpu"), tmp_path) == "cuda"
    for content in ("", "[]", '{"device": "tpu"}', '{"dev'):
        (tmp_path / DEVICE).write_text(content)
        problem = device_problem(ScalingConfig(), tmp_path)
        assert f"{DEVICE} is damaged" in problem
        assert 'write {"device": "cuda"}' in problem
        with pytest.raises(DamagedError):
            choose(tmp_path, TWO_GPUS)


def test_a_start_without_its_gpus_or_cluster_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (started := tmp_path / "started").mkdir()
    choose(started, {"CPU": 8.0, "GPU": 99.0}, num_workers=99)
    with_checkpoint(started)

    def problems(run, **scaling):
        return ray_problems(ScalingConfig(**scaling), run, own_session=True)

    assert problems(tmp_path, num_workers=99) == []
    for run, scaling, parts in (
        (tmp_path, {"device": "cuda", "num_workers": 99}, ("scaling.device = cuda", "99 workers", "GPU")),
        (started, {"num_workers": 99}, ("started on GPUs", "99 workers", "GPU")),
        (tmp_path, {"device": "cuda", "num_workers": 0}, ("scaling.device = cuda", "GPU", "this machine has 0")),
        (started, {"num_workers": 0}, ("scaling.device = auto", "GPU", "this machine has 0")),
        (tmp_path, {"address": "127.0.0.1:2"}, ("scaling.address = 127.0.0.1:2", "no Ray cluster")),
        (tmp_path, {}, ("RAY_ADDRESS = 127.0.0.1:1", "no Ray cluster")),
    ):
        if "RAY_ADDRESS" in parts[0]:
            monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        (problem,) = problems(run, **scaling)
        says(problem, *parts)
    for run in (tmp_path, started):
        (run / "summary.json").write_text("{}")
        assert problems(run) == problems(run, num_workers=99) == [], "a finished run needs none"


def agreed(comm, folder, *cases):
    """The precision of each case: a setting, and which of two workers can compute in half precision."""
    device = torch.device("cpu")
    return [agree_precision(setting, folder, device, able[comm.rank], comm) for setting, *able in cases]


@pytest.mark.dist
def test_workers_agree_on_one_precision_and_the_run_keeps_it(tmp_path):
    def precisions(*cases):
        first, second = run_group(2, agreed, tmp_path, *cases)
        assert first == second
        return first

    assert precisions(("auto", True, False), ("auto", False, True)) == ["fp32", "fp32"]
    assert read_json(tmp_path / DEVICE) == {"device": "cpu", "precision": "fp32"}
    assert precisions(("auto", True, True)) == ["bf16"], "a run without a checkpoint chooses again"
    with_checkpoint(tmp_path)
    cases = ("auto", False, True), ("auto", False, False), ("fp32", True, True)
    assert precisions(*cases) == ["bf16", "bf16", "fp32"]
    assert read_json(tmp_path / DEVICE) == {"device": "cpu", "precision": "bf16"}


def test_a_run_computes_in_its_recorded_precision_where_that_is_slow_and_says_so(tmp_path, log):
    run, losses = tmp_path / "run", []
    config = config_of(shards(tmp_path / "data"), run, scaling={"num_workers": 0}, precision="auto")
    for precision in ("fp32", "bf16"):
        save(config, run, step=1)
        (run / DEVICE).write_text(json.dumps({"device": "cpu", "precision": precision}))
        assert kept_precision("auto", run) == precision
        run_training(config)
        losses.append([line["loss"] for line in runs.steps_of(run).values()])
        shutil.rmtree(run)
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert losses[0] != losses[1]
    assert ["has no units" in line for line in log].count(True) == 1
    assert not any(map(allows_bf16, ("AVX512_CORE_VNNI", "avx2"))), "units are left out where oneDNN leaves them out"
    assert all(map(allows_bf16, ("AVX512_CORE_BF16", "avx512_core_amx", "default", "ALL")))


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
    # a GPU that was used before without the variable of cuBLAS is told apart
    sentence = "this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2."
    setting = "Deterministic behavior was enabled with `torch.use_deterministic_algorithms(True)`, but"
    message = refusal(RuntimeError(f"{setting} {sentence}"))
    says(message, f"{CUBLAS}=:4096:8", "start anew", "scaling.deterministic=false")
    assert refusal(RuntimeError("CUDA error: out of memory")) is None
    code = "import os, declutr; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    assert run_python("-c", code, env={CUBLAS: None}).stdout == ":4096:8\n"


@pytest.fixture
def torch_as_before(monkeypatch):
    monkeypatch.setenv(CUBLAS, ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.usefixtures("torch_as_before")
def test_a_process_on_a_gpu_repeats_its_bits_and_sums_go_around_a_ring(monkeypatch, log, deterministic):
    monkeypatch.setenv(CUBLAS, ":4096:2:16:8")
    scaling = ScalingConfig(deterministic=deterministic)
    set_up_torch(scaling, "bf16", torch.device("cuda"))
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.get_float32_matmul_precision() == "high"
    assert os.environ[CUBLAS] == (":4096:8" if deterministic else ":4096:2:16:8")
    assert [CUBLAS in line for line in log] == [True] * deterministic
    set_up_torch(scaling, "bf16", torch.device("cuda"))
    assert len(log) == deterministic
    with patch.dict(os.environ):
        os.environ.pop("NCCL_ALGO", None)
        backend._prepare(deterministic)
        assert os.environ.get("NCCL_ALGO") == ("Ring" if deterministic else None)


@pytest.mark.usefixtures("torch_as_before")
def test_scores_of_the_loss_are_products_in_float32(monkeypatch):
    precisions, terms = [], Declutr.terms

    def noting(objective, gathered):
        precisions.append(torch.get_float32_matmul_precision())
        return terms(objective, gathered)

    monkeypatch.setattr(Declutr, "terms", noting)
    torch.set_float32_matmul_precision("high")
    train_step = tiny_train_step(tiny_encoder(dtype=torch.float32))
    train_step.gradients({"": rank_batch(tiny_collator(), documents([200] * 2, 12))}, 1)
    assert precisions == ["highest"]
    assert torch.get_float32_matmul_precision() == "high"


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
        ends.append((train_step.step({"": second}, 2), list(train_step.encoder.parameters())))
    assert ends[0][0] == ends[1][0]
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("queued", "computed"), [(0.05, 0.004), (0.004, 0.04)])
def test_time_of_a_step_is_that_of_the_device(queued, computed, late):
    """Whether the process or its GPU is slower: a step before a validation once had 0.0002 s, and the next one two."""
    now = end = 0.0  # of the process, and of the work that it has queued
    update, seconds = 0.01, []

    class Event:
        def __init__(self):
            nonlocal end
            self.at = end = max(end, now)

        def wait(self):
            nonlocal now
            now = max(now, self.at)

        def seconds_since(self, earlier):
            return self.at - earlier.at

    class Pending:
        def __init__(self, step):
            nonlocal now, end
            now += queued  # the GPU computes what it has while the process queues more
            end = max(end, now) + computed
            self.step, self.copied = step, Event()
            end += update

        def read(self):
            self.copied.wait()
            return StepMetrics({}, {}, 1.0, 1.0, 1, 100, 0.0, 1.0, 0)

    loop = SimpleNamespace(config=SimpleNamespace(batch_documents=1), heartbeat=SimpleNamespace(line=None))
    loop.corpus_rows = loop.log_first_step = lambda *_: {}
    metrics = SimpleNamespace(add=lambda _kind, _step, line: seconds.append(line["seconds"]))
    recorder = Recorder(loop, 1, SimpleNamespace(waited_seconds=0.0), metrics, None, Event)
    for step in range(1, 13):
        pending, ended = [Pending(step)], Event()
        recorder.flush_pending()
        recorder.add(pending, ended)
        if step % 4 == 0 or not late:
            recorder.flush_pending()
            now += 7.0  # a validation
        recorder.restart_clock()
    whole = computed + update
    assert seconds == pytest.approx([max(queued, whole) if late else queued + whole] * 12, abs=0.02)
    assert max(seconds[1:3] + seconds[5:7]) - min(seconds[1:3] + seconds[5:7]) < 1e-9
    first, second = (DeviceEvent(torch.device("cpu")) for _ in range(2))  # of a processor: its clock
    first.wait()
    assert second.seconds_since(first) >= 0
