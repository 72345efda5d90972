"""Loggers beside metrics.jsonl: what they get, and that no failure of theirs reaches the run."""

import errno
import json
import logging
import os
import shutil
import struct
import time
from functools import partial
from importlib.util import find_spec

import pytest
import tinyruns as runs
from messages import says
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from declutr.trainer.driver.path_checks import place_problems
from declutr.trainer.metrics.config import WandbConfig
from declutr.trainer.metrics.loggers import GuardedLogger
from declutr.trainer.metrics.metrics import MetricsWriter, read_metrics
from declutr.trainer.metrics.tensorboard import TENSORBOARD
from declutr.trainer.metrics.wandb_logger import WANDB_ID, WandbLogger, run_id
from declutr.trainer.step.step import StepMetrics

INSTALLED = getattr(find_spec("wandb"), "origin", None) is not None
with_wandb = pytest.mark.skipif(not INSTALLED, reason="the package wandb is missing: pip install -e '.[wandb]'")
without_wandb = pytest.mark.skipif(INSTALLED, reason="the package wandb is installed")
FACTS = {"run": "/runs/mine", "host": "here", "config_hash": "1", "data_hash": "2"}
KEY = "0123456789abcdef" * 2 + "01234567"


def take(writer, steps):
    for step in steps:
        measured = StepMetrics(step / 8, {"contrastive": 1.0}, 1.0, 0.1, 1, 5, 0.0, 1.0, 7)
        writer.step(step, measured, {"seconds": 0.5, "mfu": None})


def start_wandb(folder, **changes):
    config = WandbConfig(**{"mode": "offline"} | changes)
    return {"Weights & Biases": partial(WandbLogger, config, folder, FACTS, {"optim": {"lr": 0.1}})}


def test_a_lost_logger_is_named_once_and_its_lines_counted_while_the_run_is_recorded(tmp_path, caplog):
    writer = MetricsWriter(tmp_path, 0)
    take(writer, range(1, 4))
    writer.flush()
    shutil.rmtree(tmp_path / TENSORBOARD)
    with caplog.at_level(logging.INFO, "declutr"):
        take(writer, range(4, 9))
        writer.flush()
        take(writer, range(9, 11))
        writer.flush()
        writer.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 11))
    first, second = [record.getMessage() for record in caplog.records]
    says(first, "TensorBoard", os.strerror(errno.ENOENT), "metrics.jsonl has all")
    says(second, "TensorBoard", "7 or more")


def test_a_logger_that_cannot_start_or_comes_back_ends_nothing(tmp_path, caplog):
    (tmp_path / TENSORBOARD).write_text("in the way")
    with caplog.at_level(logging.INFO, "declutr"):
        writer = MetricsWriter(tmp_path, 0)
        take(writer, [1, 2])
        writer.flush()
        writer.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert caplog.text.count("TensorBoard gets no metrics") == 1
    assert "2 or more" in caplog.text
    (tmp_path / TENSORBOARD).unlink()
    caplog.clear()
    second = MetricsWriter(tmp_path, 2)
    with caplog.at_level(logging.INFO, "declutr"):
        (tmp_path / TENSORBOARD).rename(tmp_path / "away")
        take(second, [3])
        second.flush()
        (tmp_path / "away").rename(tmp_path / TENSORBOARD)
        take(second, [4])
        second.flush()
        second.close()
    assert "TensorBoard gets metrics again; no line is missing" in caplog.text
    assert "or more" not in caplog.text
    board = EventAccumulator(str(tmp_path / TENSORBOARD), size_guidance={"scalars": 0})
    board.Reload()
    assert [event.step for event in board.Scalars("step/loss")] == [3, 4]


def test_a_logger_that_fails_for_long_is_given_up():
    started = []

    class Full:
        """A logger whose storage is full."""

        def __init__(self):
            self.lines = 0
            started.append(self)

        def add(self, _line):
            self.lines += 1

        def flush(self, _to_disk=False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    guarded = GuardedLogger("Full", Full)
    for _ in range(20_000):
        guarded.add({})
        guarded.flush()
    assert started[0].lines == 10_001
    guarded.close()


@pytest.mark.parametrize("place", ["start", "add", "flush", "close"])
def test_any_error_of_a_logger_is_named_once_and_ends_nothing(tmp_path, caplog, place):
    class Broken:
        """A logger whose package fails in one of its calls."""

        def __init__(self):
            self.at("start")

        def at(self, here):
            if here == place:
                raise ImportError("cannot import name 'runtime_version'")

        def add(self, _line):
            self.at("add")

        def flush(self, _to_disk=False):
            self.at("flush")

        def close(self):
            self.at("close")

    with caplog.at_level(logging.INFO, "declutr"):
        writer = MetricsWriter(tmp_path, 0, loggers={"Broken": Broken})
        take(writer, range(1, 6))
        writer.flush()
        take(writer, [6])
        writer.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 7))
    first, last = [record.getMessage() for record in caplog.records]
    says(first, "Broken", "ImportError: cannot import name 'runtime_version'")
    says(last, "Broken lacks", f"{0 if place == 'close' else 6} or more")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mode": "online"}, ["mode = online", "base_url", "https://api.wandb.ai"]),
        ({"mode": "offline", "base_url": "api.wandb.ai"}, ["base_url = 'api.wandb.ai'"]),
        ({"base_url": "file:///etc"}, ["base_url = 'file:///etc'"]),
        ({"base_url": "https://"}, ["base_url = 'https://'"]),
        ({"api_key": KEY}, ["api_key"]),
        ({"project": ""}, ["project"]),
    ],
)
def test_settings_of_wandb_without_an_address_or_with_a_key_are_refused(settings, told):
    with pytest.raises(ValidationError) as refused:
        WandbConfig(**settings)
    says(str(refused.value), *told)


def test_loggers_are_off_and_no_part_of_a_runs_identity():
    plain = runs.least_config()
    assert plain.metrics.wandb.mode == "disabled"
    logged = runs.least_config(metrics={"wandb": {"mode": "online", "base_url": "https://x.org", "project": "p"}})
    assert logged.hash() == plain.hash()


def test_id_is_a_function_of_the_run_and_moves_with_its_folder(tmp_path, caplog):
    one, other, fork = (tmp_path / name for name in ("one", "other", "fork"))
    for folder in (one, other, fork):
        folder.mkdir()
    found = run_id(one, FACTS)
    assert run_id(other, FACTS) == found
    assert run_id(fork, FACTS | {"run": "/runs/fork"}) != found
    assert len(found) == 16
    assert run_id(one, FACTS | {"run": "/moved", "host": "there"}) == found
    (one / WANDB_ID).write_text("{")
    with caplog.at_level(logging.WARNING, "declutr"):
        assert run_id(one, FACTS) == found
    assert WANDB_ID in caplog.text
    assert json.loads((one / WANDB_ID).read_text()) == {"id": found}


@without_wandb
def test_a_missing_package_is_named_before_ray_with_the_command_that_installs_it(tmp_path, monkeypatch):
    wanted = {"metrics": {"wandb": {"mode": "offline"}}}
    (problem,) = place_problems(wanted)
    says(problem, "metrics.wandb.mode = offline", "pip install -e '.[wandb]'", "disabled")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()  # as W&B leaves it
    monkeypatch.syspath_prepend("")
    assert place_problems(wanted) == [problem]
    for mode in ("disabled", 5, None):
        assert place_problems({"metrics": {"wandb": {"mode": mode}}}) == []


@without_wandb
def test_a_package_missing_on_the_workers_host_leaves_the_metrics_whole(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "declutr"):
        writer = MetricsWriter(tmp_path, 0, loggers=start_wandb(tmp_path))
        take(writer, range(1, 6))
        writer.flush()
        writer.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 6))
    assert caplog.text.count("pip install -e '.[wandb]'") == 1
    assert "Weights & Biases lacks the last lines" in caplog.text


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
    for done, last in ((0, 7), (5, 9)):
        writer = MetricsWriter(tmp_path, done, loggers=start_wandb(tmp_path))
        take(writer, range(done + 1, last + 1))
        writer.scores(last, {"mrr": 0.5})
        writer.close()
        time.sleep(1)  # the names of W&B's folders are seconds
    first, second = synced(tmp_path)
    assert first[0] == second[0] == json.loads((tmp_path / WANDB_ID).read_text())["id"] == run_id(tmp_path, FACTS)
    assert [(line["_step"], line["step/loss"]) for line in first[1]] == [(step, step / 8) for step in range(1, 8)]
    assert [line["_step"] for line in second[1]] == [6, 7, 8, 9]
    assert second[1][-1]["validation/mrr"] == 0.5
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


@with_wandb
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "refused"])
def test_a_dead_process_or_server_leaves_the_metrics_whole(tmp_path, caplog, monkeypatch, fault):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    changes = {"mode": "online", "base_url": "http://127.0.0.1:9"} if fault == "refused" else {}
    started = []

    def start():
        [make] = start_wandb(tmp_path, **changes).values()
        started.append(make())
        return started[0]

    with caplog.at_level(logging.INFO, "declutr"):
        writer = MetricsWriter(tmp_path, 0, loggers={"Weights & Biases": start})
        take(writer, range(1, 4))
        if fault == "kill":
            started[0].process.kill()
            started[0].process.wait()
        take(writer, range(4, 9))
        writer.flush()
        writer.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 9))
    assert caplog.text.count("Weights & Biases gets no metrics now") == 1
    assert "Weights & Biases lacks" in caplog.text
    assert KEY not in caplog.text
    assert started[0].process.poll() is not None
