import shutil

import pytest
from folders import encoder_folder


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
