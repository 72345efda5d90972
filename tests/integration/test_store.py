"""Shards and run on an S3 server: killed on one host, continued on another, in the bits of a run in a folder."""

import contextlib
import json
import os
import signal

import pytest
import tinyruns as runs
from messages import says
from processes import until
from s3server import s3_server
from tinyruns import problems

from declutr.cli.main import main
from declutr.common.errors import ConfigError
from declutr.common.lock import LOCK
from declutr.common.storage import hash_file
from declutr.common.stores.copies import fetch_all
from declutr.common.stores.folder import Folder
from declutr.encoders.loading import load_encoder
from declutr.trainer.checkpoints.checkpoint import checkpoint_path, steps_in
from declutr.trainer.run import run_folder
from declutr.trainer.train import run_training

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("session")]
STEPS = 40
CHANGES = {
    "encoder": {"dropout": 0.1},
    "objective": {"queue_size": 24},
    "steps": STEPS,
    "validation": {"every_steps": 20},
    "checkpoint": {"every_steps": 10, "keep_last": 1},
    "export": "best",
}


@pytest.fixture(scope="module")
def bucket(data):
    with s3_server() as address:
        Folder(address("data")).send(data)
        yield address


def values(bucket, tmp_path, host, **changes):
    return runs.train_values(bucket("data"), bucket("runs/one"), cache=str(tmp_path / host), **(CHANGES | changes))


def kill_after_the_first_checkpoint(config, address):
    """Begins the run, and ends all of its processes when a checkpoint is in the store."""
    driver, _ = runs.start_command("declutr.trainer.train", config, config.parent)
    first = Folder(address) / "checkpoints/step-00000010"
    try:
        until(lambda: first.is_whole() or driver.poll() is not None, "the first checkpoint", 200)
        assert driver.poll() is None, driver.communicate()
    finally:
        everything = runs.descendants(driver.pid)
        for pid in [driver.pid, *everything]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        driver.communicate()
    assert runs.wait_gone(everything) == {}


@pytest.mark.nightly
def test_a_killed_run_goes_on_on_another_host_in_the_same_bits(data, bucket, tmp_path, capsys):
    config = runs.write_config(tmp_path / "train.yaml", train=values(bucket, tmp_path, "one"))
    kill_after_the_first_checkpoint(config, bucket("runs/one"))
    assert Folder(bucket("runs/one")).read(LOCK) is not None  # of a process that is known to be gone

    second = runs.TrainConfig.model_validate(values(bucket, tmp_path, "other"))
    summary = run_training(second)
    local = tmp_path / "local"
    run_training(runs.train_config(data, local, **CHANGES, scaling={"num_workers": 0}))

    back = tmp_path / "back"
    fetch_all(Folder(bucket("runs/one")), back)
    assert summary["export"] == Folder(bucket("runs/one")).at("export")
    assert runs.steps_of(back) == runs.steps_of(local)
    assert runs.steps_of(back, "validation") == runs.steps_of(local, "validation")
    assert steps_in(back / "checkpoints") == steps_in(local / "checkpoints")
    for step in steps_in(local / "checkpoints"):
        for name in ("encoder.safetensors", "optimizer.safetensors", "objective.safetensors"):
            paths = [checkpoint_path(run / "checkpoints", step) / name for run in (back, local)]
            assert hash_file(paths[0]) == hash_file(paths[1]), (step, name)
    assert hash_file(back / "export" / "model.safetensors") == hash_file(local / "export" / "model.safetensors")
    checkpoint = checkpoint_path(back / "checkpoints", STEPS)
    assert load_encoder(str(checkpoint)).size == load_encoder(str(back / "export")).size, "with the run's own tokenizer"
    assert LOCK not in Folder(bucket("runs/one")).names()
    assert json.loads(Folder(bucket("runs/one")).read("summary.json")) == summary
    finished = runs.TrainConfig.model_validate(values(bucket, tmp_path, "fourth"))
    assert run_training(finished) == summary, "on a host that never trained it"

    changed = runs.TrainConfig.model_validate(values(bucket, tmp_path, "third", steps=STEPS + 1))
    with pytest.raises(ConfigError, match="another configuration"):
        run_training(changed)
    assert problems(second) == []
    assert main(["inspect", bucket("runs/one")]) == 1
    says(capsys.readouterr().err, "declutr copy s3://")
    assert run_folder(second.run, second.cache).parent == tmp_path / "other"


def test_a_run_without_a_checkpoint_takes_other_settings(bucket, tmp_path):
    address = bucket("runs/begun")
    begun = runs.train_config(bucket("data"), address, cache=str(tmp_path / "host"), optim={"lr": 0.1})
    Folder(address).put("resume_settings.json", json.dumps(begun.resume_settings()).encode())
    other = begun.model_copy(update={"optim": begun.optim.model_copy(update={"lr": 0.01})})
    folder = run_folder(address, other.cache)
    folder.mkdir(parents=True)
    (folder / "resume_settings.json").write_text(json.dumps(begun.resume_settings()))
    assert problems(other) == []
    Folder(address).put("checkpoints/step-00000025/state.json", b"{}")
    says(problems(other), "another configuration", "optim.lr")
