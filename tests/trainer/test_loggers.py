"""Every step once, in the file and in the loggers beside it; no failure of a logger reaches the run."""

import errno
import json
import math
import os
import shutil
import struct
import threading
import time
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import psutil
import pytest
from messages import says
from processes import until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from volumes import small_volume

from declutr.common import errors
from declutr.trainer.driver.checks import place_problems
from declutr.trainer.metrics import loggers
from declutr.trainer.metrics.config import WandbConfig
from declutr.trainer.metrics.loggers import TENSORBOARD, WANDB_ID, ProgressBar, run_id, tensorboard, wandb_run
from declutr.trainer.metrics.metrics import METRICS, MetricsWriter, read_last_step, read_metrics
from declutr.trainer.step.step import StepMetrics


def shown(folder, tag="step/loss"):
    board = EventAccumulator(str(folder / TENSORBOARD), size_guidance={"scalars": 0})
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(tag)]


def test_metrics_continue_after_a_resume(tmp_path):
    first = MetricsWriter(tmp_path, 0)
    take(first, range(1, 8))
    first.add("validation", 4, {"mrr": 0.5})
    first.close()
    with (tmp_path / METRICS).open("a") as stream:
        stream.write('{"kind": "step", "st')  # a kill
    time.sleep(1.1)  # the names of TensorBoard's files are seconds
    second = MetricsWriter(tmp_path, 5)
    take_all(second, 9, first=6)
    assert (steps_in(tmp_path), read_last_step(tmp_path / METRICS)["step"]) == (list(range(1, 10)), 9)
    assert shown(tmp_path) == [(step, step / 8) for step in range(1, 10)]
    assert shown(tmp_path, "validation/mrr") == [(4, 0.5)]


def test_metrics_that_are_not_finite_are_null(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    bad = StepMetrics(math.nan, {"contrastive": math.inf, "mlm": 1.0}, -math.inf, 0.1, 1, 5, 0.0, 1.0, 7, skipped=True)
    writer.add("step", 1, bad.line())
    writer.close()
    line = json.loads((tmp_path / METRICS).read_text(), parse_constant=pytest.fail)
    assert line["loss"] is line["contrastive"] is line["grad_norm"] is None
    assert line["skipped"] is True
    assert shown(tmp_path, "step/skipped") == [(1, 1.0)]


INSTALLED = getattr(find_spec("wandb"), "origin", None) is not None
with_wandb = pytest.mark.skipif(not INSTALLED, reason="the package wandb is missing: pip install -e '.[wandb]'")
without_wandb = pytest.mark.skipif(INSTALLED, reason="the package wandb is installed")
FACTS = {"run": "/runs/mine", "host": "here", "config_hash": "1", "data_hash": "2"}
KEY = "0123456789abcdef" * 2 + "01234567"


def take(writer, steps):
    for step in steps:
        measured = StepMetrics(step / 8, {"contrastive": 1.0, "mlm": 2.0}, 1.0, 0.1, 1, 5, 0.0, 1.0, 7)
        writer.add("step", step, measured.line() | {"seconds": 0.5, "mfu": None})


def take_all(writer, last, first=1):
    take(writer, range(first, last + 1))
    writer.flush()
    writer.close()


def steps_in(folder):
    return [line["step"] for line in read_metrics(folder) if line["kind"] == "step"]


def start_wandb(folder, **changes):
    config = WandbConfig(**{"mode": "offline"} | changes)
    return {"Weights & Biases": partial(wandb_run, config, folder, FACTS, {"optim": {"lr": 0.1}})}


def wait_for_lines(writer, number):
    """Waits until the last logger got a number of lines, or failed."""
    logger = writer._loggers[-1]
    until(lambda: logger._passed >= number or logger._failed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_a_full_and_a_read_only_storage_lose_nothing_and_tensorboard_starts_again(tmp_path, log):
    with small_volume(tmp_path / "small", 2) as volume:
        run = volume.path / "run"
        run.mkdir()
        writer = MetricsWriter(run, 0)
        take(writer, range(1, 11))
        writer.flush()
        wait_for_lines(writer, 10)
        volume.fill()
        take(writer, range(11, 200))
        with pytest.raises(OSError, match="No space"):
            writer.flush()
        wait_for_lines(writer, 199)  # TensorBoard has failed and closed its file: the volume can be mounted again
        volume.drain()
        writer.flush()
        volume.read_only(True)
        take(writer, range(200, 210))
        volume.read_only(False)
        writer.close()
        assert steps_in(run) == list(range(1, 210))
        first, second = [line for line in log if "TensorBoard" in line]
        says(first, "TensorBoard gets no more metrics", os.strerror(errno.ENOSPC))
        says(second, "TensorBoard lacks")
        take_all(MetricsWriter(run, 200), 202, first=201)
        assert [step for step, _ in shown(run) if step > 200] == [201, 202]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", ["lost", "in the way", "missing"])
def test_a_tensorboard_that_fails_is_named_once_and_its_lines_counted(tmp_path, log, monkeypatch, fault):
    if fault == "in the way":
        (tmp_path / TENSORBOARD).write_text("in the way")
    elif fault == "missing":
        monkeypatch.setattr(errors, "find_spec", lambda _name: None)
    writer = MetricsWriter(tmp_path, 0)
    take(writer, range(1, 4))
    if fault == "lost":
        wait_for_lines(writer, 3)
        shutil.rmtree(tmp_path / TENSORBOARD)
    take_all(writer, 10, first=4)
    assert steps_in(tmp_path) == list(range(1, 11))
    first, second = log
    reasons = {"lost": os.strerror(errno.ENOENT), "in the way": "", "missing": "pip install tensorboard"}
    says(first, "TensorBoard gets no more metrics", reasons[fault], "metrics.jsonl has all")
    says(second, "TensorBoard lacks", f"{7 if fault == 'lost' else 10} or more")


def test_a_folder_that_was_renamed_before_tensorboard_is_loaded_is_not_made_anew(tmp_path):
    with pytest.raises(FileNotFoundError), tensorboard(tmp_path / "run", 0):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["start", "log", "end", "hang", "endless"])
def test_a_program_that_fails_or_hangs_is_named_once_and_ends_nothing(tmp_path, log, monkeypatch, place):
    free, error = threading.Event(), ImportError("cannot import name 'runtime_version'")

    @contextmanager
    def broken():
        def reach(here):
            if here == place:
                raise error
            if here == {"hang": "log", "endless": "end"}.get(place):
                free.wait(60)

        reach("start")
        yield lambda _line: reach("log")
        reach("end")

    monkeypatch.setattr(loggers, "_MOST_WAITING", 3)
    if place == "endless":
        monkeypatch.setattr(loggers, "_LAST_SECONDS", 0.2)
    writer, began = MetricsWriter(tmp_path, 0, loggers={"Broken": broken}), time.monotonic()
    for step in range(1, 7):
        take(writer, [step])
        if place != "hang":  # the queue of a program that works stays short
            wait_for_lines(writer, step)
    writer.flush()
    writer.close()
    free.set()
    assert time.monotonic() - began < 45  # it does not wait for the program, which hangs for a minute
    assert steps_in(tmp_path) == list(range(1, 7))
    first, last = [text for text in log if "Broken" in text]
    reasons = {"hang": "it takes no lines", "endless": "did not end within 0.2 s"}
    says(first, "Broken gets no more metrics", reasons.get(place, str(error)))
    says(last, "Broken lacks", f"{0 if place in ('end', 'endless') else 6} or more")


def test_id_is_a_function_of_the_run_and_moves_with_its_folder(tmp_path, log):
    for name in ("run", "other", "fork"):
        (tmp_path / name).mkdir()
    run = tmp_path / "run"
    identity = run_id(run, FACTS)
    assert run_id(tmp_path / "other", FACTS) == identity
    assert run_id(tmp_path / "fork", FACTS | {"run": "/runs/fork"}) != identity
    assert len(identity) == 16
    assert run_id(run, FACTS | {"run": "/moved", "host": "there"}) == identity
    for number, damaged in enumerate(("{", "{}"), 1):
        (run / WANDB_ID).write_text(damaged)
        assert run_id(run, FACTS) == identity
        assert "\n".join(log).count(WANDB_ID) == number
        assert json.loads((run / WANDB_ID).read_text()) == {"id": identity}


@without_wandb
def test_a_missing_package_is_named_with_its_command_before_ray_and_leaves_the_metrics_whole(
    tmp_path, log, monkeypatch
):
    """The package may be missing on the worker's host alone."""
    take_all(MetricsWriter(tmp_path, 0, loggers=start_wandb(tmp_path)), 5)
    assert steps_in(tmp_path) == list(range(1, 6))
    command = "pip install wandb"
    assert "\n".join(log).count(command) == 1
    says(log, "Weights & Biases lacks the last lines of metrics (5 or more)")
    offline = {"metrics": {"wandb": {"mode": "offline"}}}
    (problem,) = place_problems(offline)
    says(problem, "metrics.wandb.mode = offline", command, "disabled")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()  # as W&B leaves it
    monkeypatch.syspath_prepend("")
    assert place_problems(offline) == [problem]
    for mode in ("disabled", 5, None):
        assert place_problems({"metrics": {"wandb": {"mode": mode}}}) == []


def synced(folder):
    """Steps and losses of the offline files in a run's folder, by file."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        raw, place, piece, lines = path.read_bytes(), 7, b"", []
        while place + 7 < len(raw):
            if 2**15 - place % 2**15 < 7:
                place += 2**15 - place % 2**15
                continue
            _, size, kind = struct.unpack_from("<IHB", raw, place)
            piece += raw[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # a whole record, or the last part of one
                record = Record.FromString(piece)
                piece = b""
                if record.WhichOneof("record_type") == "history":
                    items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                    lines.append({name: json.loads(value) for name, value in items.items()})
        found.append((path.stem.removeprefix("run-"), lines))
    return found


@with_wandb
@pytest.mark.slow
def test_offline_run_holds_every_step_under_one_id_and_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "online")  # settings decide, not the environment
    monkeypatch.setenv("WANDB_RUN_ID", "other")
    (tmp_path / "wandb").mkdir()  # as the folder of a run of somebody else may have it
    (tmp_path / "wandb" / "settings").write_text("[default]\nrun_group = stranger\n")
    (tmp_path / "config-defaults.yaml").write_text("stranger:\n  value: 1\n")
    for done, last in ((0, 7), (5, 9)):
        writer = MetricsWriter(tmp_path, done, loggers=start_wandb(tmp_path))
        take(writer, range(done + 1, last + 1))
        writer.add("validation", last, {"mrr": 0.5})
        writer.close()
        time.sleep(1)  # the names of W&B's folders are seconds
    first, second = synced(tmp_path)
    assert first[0] == second[0] == json.loads((tmp_path / WANDB_ID).read_text())["id"] == run_id(tmp_path, FACTS)
    assert [(line["_step"], line["step/loss"]) for line in first[1]] == [(step, step / 8) for step in range(1, 8)]
    assert [line["_step"] for line in second[1]] == [6, 7, 8, 9]
    assert second[1][-1]["validation/mrr"] == 0.5
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert not [path for path in (tmp_path / "wandb").glob("*/*.wandb") if b"stranger" in path.read_bytes()]


@with_wandb
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "refused"])
def test_a_dead_process_or_server_leaves_the_metrics_whole(tmp_path, log, monkeypatch, fault):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    changes = {"mode": "online", "base_url": "http://127.0.0.1:9"} if fault == "refused" else {}
    writer = MetricsWriter(tmp_path, 0, loggers=start_wandb(tmp_path, **changes))
    take(writer, range(1, 4))
    wait_for_lines(writer, 3)
    [process] = [child for child in psutil.Process().children() if loggers.__name__ in child.cmdline()]
    if fault == "kill":
        process.kill()
        process.wait()
    began = time.monotonic()
    take_all(writer, 8, first=4)
    assert time.monotonic() - began < 14
    assert steps_in(tmp_path) == list(range(1, 9))
    text = "\n".join(log)
    assert text.count("Weights & Biases gets no more metrics") == 1
    assert "Weights & Biases lacks" in text
    assert KEY not in text
    assert not process.is_running()


def test_the_bar_of_a_continued_run_shows_earlier_steps_and_a_loss_that_is_not_finite(capsys):
    for line, text in ((None, "(15 of 16)"), ({"step": 16, "skipped": False, "loss": None}, "loss not finite")):
        with ProgressBar(lambda line=line: line, 16, [], "docs", done=15):
            pass
        assert text in capsys.readouterr().err
