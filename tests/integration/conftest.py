"""A prepared corpus, and a run that the command trained: once for all tests, also of several processes."""

import contextlib
import io
import os
import shutil

import pytest
import ray
import tinyruns as runs
from filelock import FileLock

from declutr.common.session import start_ray
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import prepare
from declutr.trainer.train import main as train


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


@contextlib.contextmanager
def any_session():
    """The session of this process, or one for the block alone."""
    alive = ray.is_initialized()
    start_ray(num_cpus=6)
    try:
        yield
    finally:
        if not alive:
            ray.shutdown()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    def make(folder):
        runs.write_corpus(folder / "corpus.jsonl")
        with any_session():
            prepare(PipelineConfig.model_validate(runs.prepare_values(folder / "corpus.jsonl", folder / "out")))

    return made_once(tmp_path_factory, "data", make) / "out"


@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """Folder with `train.yaml` and its finished run, made by the command. Copy before changing anything."""

    def make(folder):
        values = runs.train_values(data, folder / "run", **runs.FINISHED)
        config = str(runs.write_config(folder / "train.yaml", train=values))
        with any_session(), contextlib.redirect_stdout(io.StringIO()) as output:
            assert train([config]) == 0
        (line,) = output.getvalue().splitlines()
        assert "8 steps in" in line
        assert str(folder / "run" / "export") in line

    return made_once(tmp_path_factory, "finished", make)


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"
