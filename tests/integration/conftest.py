"""A corpus prepared by the real command, once for all tests."""

import pytest
import runs


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
