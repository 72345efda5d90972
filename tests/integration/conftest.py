"""A corpus prepared by the real command, once for all tests."""

import shutil

import pytest
import tinyruns as runs


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Folder of tiny prepared shards."""
    folder = tmp_path_factory.mktemp("data")
    runs.write_corpus(folder / "corpus.jsonl")
    config = runs.write_config(
        folder / "prepare.yaml", prepare=runs.prepare_values(folder / "corpus.jsonl", folder / "out")
    )
    done = runs.run_command("pipeline.prepare", config)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """Folder with `train.yaml` and its finished run, made by the real command. Copy before changing anything."""
    folder = tmp_path_factory.mktemp("finished")
    values = runs.train_values(data, folder / "run", **runs.FINISHED)
    done = runs.run_command("trainer.train", runs.write_config(folder / "train.yaml", train=values))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert "8 steps in" in line
    assert str(folder / "run" / "export") in line
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run, to break."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"
