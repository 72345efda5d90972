import pytest


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A folder with a tiny encoder with random weights, which no test changes."""
    from adapting import write_encoder

    return write_encoder(tmp_path_factory.mktemp("encoder"))
