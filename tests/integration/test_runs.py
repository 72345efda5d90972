"""Runs sharded, elastic, or on an S3 server and continued elsewhere: the numbers, files and export of a plain one."""

import contextlib
import json
import os
import signal

import pytest
import tinyruns as runs
from measures import deviation
from messages import says
from processes import until
from s3server import s3_server
from safetensors.torch import load_file
from tinyruns import problems

from declutr.cli.demo import QUERIES
from declutr.cli.main import main
from declutr.common.errors import ConfigError
from declutr.common.lock import LOCK
from declutr.common.storage import hash_file
from declutr.common.stores.copies import fetch_all
from declutr.common.stores.folder import Folder
from declutr.encoders.loading import load_encoder
from declutr.trainer.checkpoints.checkpoint import checkpoint_path, steps_in
from declutr.trainer.run import run_folder
from declutr.trainer.train import run_training, train

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]
FILES = ("encoder.safetensors", "optimizer.safetensors", "objective.safetensors")
STEPS = 40
CHANGES = {"encoder": {"dropout": 0.1}, "objective": {"queue_size": 24}, "steps": STEPS, "export": "best"}
CHANGES |= {"validation": {"every_steps": 20}, "checkpoint": {"every_steps": 10, "keep_last": 1}}


def trained(data, run, workers, **changes):
    scaling = {"num_workers": workers} | changes.pop("scaling", {})
    train(runs.train_config(data, run, **runs.FINISHED | {"scaling": scaling} | changes))
    return run


def results(run):
    """Checksums of the weights and moments of each checkpoint, and the lines of steps and validations."""
    sums = {
        f"{step} {name}": hash_file(checkpoint_path(run / "checkpoints", step) / name)
        for step in steps_in(run / "checkpoints")
        for name in FILES
    }
    sums["export"] = hash_file(run / "export" / "model.safetensors")
    return sums, runs.steps_of(run), runs.steps_of(run, "validation")


def test_the_demo_compares_with_random_weights_and_words_and_searches(data, finished, tmp_path, capsys):
    """What is prepared and trained already is taken as it is."""
    preparation = runs.prepare_values(data.parent / "corpus.jsonl", data)
    training = runs.train_values(data, finished / "run", **runs.FINISHED)
    config = runs.write_config(tmp_path / "demo.yaml", prepare=preparation, train=training)
    assert main(["demo", "--config", str(config)]) == 0
    rows = json.loads((finished / "summary.json").read_text())
    assert list(rows) == ["untrained", "trained", "BM25", "IDF cosine", "trained + IDF", "verdict", "seconds"]
    shown = [f"{name:14s}{100 * rows[name]:5.1f}" for name in ("untrained", "trained", "BM25")]
    output = capsys.readouterr().out
    assert [part for part in (*shown, "to tell: 62 test documents", *QUERIES) if part not in output] == []


@pytest.mark.nightly
def test_a_sharded_run_is_the_run_that_is_not_and_continues_to_the_bit(data, finished, tmp_path):
    """Two workers with sharded parameters; else as `finished`."""
    sharded = trained(data, tmp_path / "sharded", 2, scaling={"fsdp": True})
    other = finished / "run"
    for kind in ("step", "validation"):
        lines, expected = runs.steps_of(sharded, kind), runs.steps_of(other, kind)
        assert list(lines) == list(expected)
        for step, line in expected.items():
            assert lines[step] == pytest.approx(line, rel=1e-3, abs=0.03 if kind == "validation" else 1e-9), step
    for name in (f"checkpoints/step-00000008/{FILES[0]}", "export/model.safetensors"):
        tensors, expected = load_file(sharded / name), load_file(other / name)
        assert tensors.keys() == expected.keys()
        assert deviation([tensors[key] for key in expected], expected.values()) < 1e-3, name
    assert json.loads((sharded / "checkpoints/step-00000008/state.json").read_text())["world_size"] == 2

    again, *lines = results(trained(data, runs.cut(sharded, tmp_path / "run", last=6), 2, scaling={"fsdp": True}))
    expected, *expected_lines = results(sharded)
    assert lines == expected_lines
    names = [f"8 {name}" for name in FILES] + ["export"]
    assert [again[name] for name in names] == [expected[name] for name in names]


@pytest.mark.nightly
def test_two_then_three_workers_then_none_are_one_process(data, tmp_path):
    kept = {"every_steps": 2, "keep_last": 2, "keep_every_steps": 2}
    changes = {"scaling": {"elastic_determinism": True}, "checkpoint": kept}
    alone = results(trained(data, tmp_path / "alone", 0, **changes))
    assert (len(alone[0]), len(alone[1])) == (4 * len(FILES) + 1, 8)
    run = trained(data, tmp_path / "two", 2, **changes)
    assert results(run) == alone
    for workers, name, last in ((3, "three", 2), (0, "one", 6)):
        run = trained(data, runs.cut(run, tmp_path / name, last), workers, **changes)
        assert results(run) == alone


@pytest.fixture(scope="module")
def bucket(data):
    with s3_server() as address:
        Folder(address("data")).send(data)
        yield address


@pytest.mark.slow
@pytest.mark.nightly
def test_a_killed_run_goes_on_on_another_host_in_the_same_bits(data, bucket, tmp_path, capsys):
    address, run = bucket("runs/one"), Folder(bucket("runs/one"))

    def values(host, **changes):
        return runs.train_values(bucket("data"), address, cache=str(tmp_path / host), **CHANGES | changes)

    config = runs.write_config(tmp_path / "train.yaml", train=values("one"))
    driver, _ = runs.start_command("declutr.trainer.train", config, tmp_path)
    first = run / "checkpoints/step-00000010"
    until(lambda: first.is_whole() or driver.poll() is not None, "the first checkpoint", 200)
    everything = [driver.pid, *runs.descendants(driver.pid)]
    assert len(everything) > 1, driver.communicate()
    for pid in everything:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.communicate()
    assert runs.wait_gone(everything) == {}
    assert run.read(LOCK) is not None  # of a process that is known to be gone

    second = runs.TrainConfig.model_validate(values("other"))
    summary = run_training(second)
    local, back = tmp_path / "local", tmp_path / "back"
    run_training(runs.train_config(data, local, **CHANGES, scaling={"num_workers": 0}))
    fetch_all(run, back)
    assert summary["export"] == run.at("export")
    assert results(back) == results(local)
    last = checkpoint_path(back / "checkpoints", STEPS)
    assert load_encoder(str(last)).size == load_encoder(str(back / "export")).size, "with the run's own tokenizer"
    assert LOCK not in run.names()
    assert json.loads(run.read("summary.json")) == summary
    finished = runs.TrainConfig.model_validate(values("fourth"))
    assert run_training(finished) == summary, "on a host that never trained it"

    with pytest.raises(ConfigError, match="another configuration"):
        run_training(runs.TrainConfig.model_validate(values("third", steps=STEPS + 1)))
    assert problems(second) == []
    assert main(["inspect", address]) == 1
    says(capsys.readouterr().err, "declutr copy s3://")
    assert run_folder(second.run, second.cache).parent == tmp_path / "other"


@pytest.mark.slow
def test_a_run_without_a_checkpoint_takes_other_settings(bucket, tmp_path):
    address = bucket("runs/begun")
    begun = runs.train_config(bucket("data"), address, cache=str(tmp_path / "host"), optim={"lr": 0.1})
    settings = json.dumps(begun.resume_settings())
    Folder(address).put("resume_settings.json", settings.encode())
    other = begun.model_copy(update={"optim": begun.optim.model_copy(update={"lr": 0.01})})
    folder = run_folder(address, other.cache)
    folder.mkdir(parents=True)
    (folder / "resume_settings.json").write_text(settings)
    assert problems(other) == []
    Folder(address).put("checkpoints/step-00000025/state.json", b"{}")
    says(problems(other), "another configuration", "optim.lr")
