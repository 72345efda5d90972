"""Every small file of a run, damaged in every way; an export is whole and of its very checkpoint."""

import json
import re
import shutil

import pytest
import tinyruns as runs
from broken import DAMAGED, contents, empty, flip_a_bit, remove, truncate
from madeup import STEPS, config_of, finish, save
from messages import all_of
from processes import ROOT

from declutr.common.config import load_config
from declutr.common.errors import CheckpointError, ConfigError, DamagedError, UsageError
from declutr.inspection.describe import checkpoint_rows, describe, describe_run
from declutr.trainer.checkpoints.checkpoint import find_latest
from declutr.trainer.checkpoints.state import SETTINGS
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver.continuation import add_seconds, ended_early
from declutr.trainer.driver.export import export
from declutr.trainer.metrics.metrics import METRICS, MetricsWriter, read_last_step, read_metrics
from declutr.trainer.train import run_training

DAMAGES = {"empty": b"", **DAMAGED}
STATE = f"checkpoints/step-{STEPS:08d}/state.json"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished.run, tmp_path / "run")


def train(config, run):
    run_training(config.model_copy(update={"run": str(run)}))


# The commands that read a file and do not write it again; those are below.
READERS = {
    "export/declutr.json": [lambda _, run: list(describe(run / "export"))],
    "metrics.jsonl": [train, lambda _, run: list(describe_run(run, checkpoint_rows(run), verified=True))],
    STATE: [lambda _, run: checkpoint_rows(run)],
}


@pytest.mark.parametrize("damage", ["empty", "an empty object", "an empty list", "wrong types"])
@pytest.mark.parametrize("name", READERS)
def test_a_command_continues_or_names_the_file(finished, run, name, damage):
    (run / name).write_bytes(DAMAGES[damage])
    for command in READERS[name]:
        message = name
        try:
            assert command(finished, run) or command == train
        except (ConfigError, CheckpointError, UsageError, DamagedError) as error:
            message = str(error)
        assert name.rpartition("/")[2] in message or "no good checkpoint" in message


@pytest.mark.parametrize("name", ["summary.json", "seconds.json", "resume_settings.json", "export/declutr.json"])
@pytest.mark.parametrize("damage", ["empty", "an empty object", "an empty list", "garbage", "nested deeply"])
def test_the_command_mends_what_it_wrote_itself(finished, run, log, name, damage):
    (run / name).write_bytes(DAMAGES[damage])
    if name == "summary.json":
        assert ended_early(run, finished.validation.patience, STEPS) is None
    add_seconds(run, 2.0) if name == "seconds.json" else train(finished, run)
    mended = json.loads((run / name).read_text())
    assert mended == 2.0 if name == "seconds.json" else type(mended) is dict
    assert any(f"{name} is damaged" in line for line in log)
    log.clear()
    train(finished, run)
    assert not any("damaged" in line for line in log)


@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_without_a_word_on_its_configuration_the_checkpoints_are_asked(finished, run, content):
    (run / "resume_settings.json").unlink() if content is None else (run / "resume_settings.json").write_bytes(content)
    with pytest.raises(ConfigError, match=all_of("another configuration", "resume_settings.json")):
        run_training(config_of(finished.data, run, optim={"lr": 0.5}))
    train(finished, run)


def test_no_difference_of_the_settings_goes_unseen(finished, run):
    """As of another version, or of an objective that was edited: a worker would take no checkpoint, and begin again."""
    for section, optim, difference in (
        ({"max_skipped": None}, {}, "optim.max_skipped was None, now not set"),
        ({"schedule_arguments": {}}, {}, "optim.schedule_arguments was {}, now not set"),
        ({"weight_decay": 0}, {"weight_decay": 0.0}, "optim.weight_decay was 0, now 0.0"),
    ):
        config = finished.model_copy(update={"optim": finished.optim.model_copy(update=optim)})
        before = config.model_copy(update={"run": str(run)}).resume_settings()
        (run / "resume_settings.json").write_text(json.dumps(before | {"optim": before["optim"] | section}))
        whole = contents(run)
        with pytest.raises(ConfigError, match=all_of(difference, "name another folder")) as error:
            train(config, run)
        assert contents(run) == whole
        remedy = re.findall(r"encoder\.\S+=\S+", str(error.value))
        new = load_config(ROOT / "configs/cpu-small.yaml", "train", TrainConfig, ["run=new", *remedy])
        assert (new.encoder.pretrained, new.encoder.from_config) == (f"{run}/export", None)


def test_checkpoints_of_another_configuration_or_beyond_the_last_step_are_refused(finished, run):
    state = (run / STATE).read_text()
    (run / STATE).write_text(json.dumps(json.loads(state) | {"config_hash": "0" * 64}))
    with pytest.raises(ConfigError, match=all_of(f"step-{STEPS:08d} is of another configuration")):
        train(finished, run)
    (run / STATE).write_text(state)
    save(finished, run, step=STEPS + 93)
    with pytest.raises(CheckpointError, match=all_of("step 99", "step 6")):
        train(finished, run)


def test_an_impossible_state_is_passed_over(run, log):
    state = json.loads((run / STATE).read_text())
    steps = ({"step": step} for step in (0, -6, STEPS + 1, 10**12, 6.5, "6", True))
    counts = {"documents": -1}, {"world_size": 0}, {"skipped": -1}, {"files": {}}, {"sizes": {}}
    weights = {"sizes": {"encoder.safetensors": 0}}, {"files": {"encoder.safetensors": "xxh3:0"}}
    for change in (*steps, *counts, *weights):
        log.clear()
        (run / STATE).write_text(json.dumps(state | change))
        assert find_latest(run / "checkpoints") is None, change
        assert any("broken checkpoint" in line and "state.json" in line for line in log), change


@pytest.mark.parametrize("damage", ["garbage", "half", "an empty list", "wrong types", "nested deeply"])
def test_a_damaged_line_of_metrics_is_named_and_kept(run, log, damage):
    lines = (run / METRICS).read_bytes().split(b"\n")
    lines[2] = DAMAGES[damage]
    (run / METRICS).write_bytes(b"\n".join(lines))
    damaged = (run / METRICS).read_bytes()
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 4, 5, 6]
    assert any(f"{METRICS}, line 3" in line for line in log)
    log.clear()
    MetricsWriter(run, 5).close()
    assert any(f"{METRICS}, line 3" in line and f"{METRICS}.kept-1" in line for line in log)
    assert (run / f"{METRICS}.kept-1").read_bytes() == damaged
    log.clear()
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 4, 5]
    assert log == []


@pytest.mark.parametrize("damage", DAMAGED)
def test_metrics_end_at_the_last_step_before_a_damaged_line(run, damage):
    with (run / METRICS).open("ab") as stream:
        stream.write(DAMAGED[damage] + b"\n")
    assert read_last_step(run / METRICS)["step"] == STEPS


FILES = ("model.safetensors", "config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json", "README.md")


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, truncate) for name in (*FILES, SETTINGS)]
    + [(name, damage) for name in (FILES[0], SETTINGS) for damage in (empty, flip_a_bit, remove)],
)
def test_a_damaged_export_is_made_again_and_nothing_is_lost(finished, run, log, name, damage):
    whole = contents(run / "export")
    damage(run / "export" / name)
    damaged = contents(run / "export")
    export(runs.resolved(finished, run), 8)
    assert contents(run / "export") == whole
    assert any(name in line and "exporting again" in line for line in log)
    assert contents(run / "export.kept-1") == damaged


def test_a_whole_export_is_left_alone_with_what_others_put_there_and_put_back_after_a_kill(finished, run, log):
    (run / "export" / "onnx").mkdir()
    (run / "export" / "onnx" / "model.onnx").write_text("theirs")
    before = {path: path.stat().st_mtime_ns for path in (run / "export").rglob("*")}
    whole = contents(run / "export")
    export(runs.resolved(finished, run), 8)
    assert {path: path.stat().st_mtime_ns for path in (run / "export").rglob("*")} == before
    assert log == []
    (run / "export").rename(run / ".export.before.tmp")
    export(runs.resolved(finished, run), 8)
    assert contents(run / "export") == whole
    assert not (run / ".export.before.tmp").exists()


@pytest.mark.parametrize("others", [False, True])
def test_the_export_of_another_checkpoint_with_the_same_step_gives_way(finished, run, log, others):
    old = contents(run / "export")
    if others:
        (run / "export" / "notes.txt").write_text("theirs")
    shutil.rmtree(run / "checkpoints")
    save(finished, run, seed=1)
    export(runs.resolved(finished, run), 8)
    new = contents(run / "export")
    assert new["model.safetensors"] != old["model.safetensors"]
    assert any("another checkpoint" in line for line in log)
    assert (run / "export.kept-1" / "notes.txt").is_file() == others
