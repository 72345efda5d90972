import shutil

import pytest
from folders import encoder_folder
from messages import says

from declutr.cli.main import main


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A small encoder, not to be changed."""
    return str(encoder_folder(tmp_path_factory.mktemp("encoder") / "tiny"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """One with a dense layer, not to be changed."""
    return encoder_folder(tmp_path_factory.mktemp("whole") / "encoder", after=["Dense"])


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(whole, tmp_path / "encoder")


@pytest.fixture
def refused(capsys):
    """Runs a command, which must end with status 1 and an error of these parts."""

    def run(command, *parts):
        capsys.readouterr()
        assert main([*map(str, command)]) == 1
        says(capsys.readouterr().err, *parts)

    return run
