import pytest
from browser import start_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with start_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started
