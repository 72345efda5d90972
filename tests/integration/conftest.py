"""A corpus prepared by the real command, and a run that it trained: once for all tests, also of several processes."""

import os
import shutil

import pytest
import tinyruns as runs
from filelock import FileLock


def made_once(factory, name, make):
    """The folder of that name, which the first process of this test run to ask for it fills with `make(folder)`."""
    top = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top = top.parent
    folder = top / name
    with FileLock(top / f"{name}.lock"):
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Folder of tiny prepared shards."""

    def make(folder):
        runs.write_corpus(folder / "corpus.jsonl")
        values = runs.prepare_values(folder / "corpus.jsonl", folder / "out")
        done = runs.run_command("declutr.pipeline.prepare", runs.write_config(folder / "prepare.yaml", prepare=values))
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "data", make) / "out"


@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """Folder with `train.yaml` and its finished run, made by the real command. Copy before changing anything."""

    def make(folder):
        values = runs.train_values(data, folder / "run", **runs.FINISHED)
        done = runs.run_command("declutr.trainer.train", runs.write_config(folder / "train.yaml", train=values))
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        assert "8 steps in" in line
        assert str(folder / "run" / "export") in line

    return made_once(tmp_path_factory, "finished", make)


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run, to break."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"
