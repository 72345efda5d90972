"""A hub that does not answer is asked once, for a moment; from then on only its cache here is used."""

import contextlib
import socket

import pytest
from huggingface_hub import constants
from messages import all_of, says

from declutr.common import hub
from declutr.common.errors import ConfigError
from declutr.pipeline.readers.corpus import HubCorpus
from declutr.pipeline.readers.inputs import find_inputs
from declutr.pipeline.readers.planning import hub_inputs
from declutr.pipeline.readers.skipped import Skipped
from declutr.pipeline.tokenizer.tokenization import load_tokenizer


class Silent:
    """A server that takes every connection and never answers."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def connections(self):
        """How many were made since the last time."""
        number = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self.socket.accept()[0].close()
                number += 1
        return number


@pytest.fixture
def silent(monkeypatch, tmp_path):
    server = Silent()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 1.0)
    yield server
    server.socket.close()


def test_hub_is_asked_once(silent):
    says(hub.hub_problem(), "not answer")
    with pytest.raises(ConfigError, match=all_of("folder", "cache", "no copy", "not answer")):
        load_tokenizer("owner/none-of-this-name")
    with pytest.raises(OSError, match="does not answer"):
        list(find_inputs("hf://datasets/owner/none/x.txt", Skipped()))
    _, (problem,) = hub_inputs(HubCorpus(kind="hub", name="owner/none"))
    assert "corpus.name = 'owner/none'" in problem
    assert silent.connections() == 1


def test_hub_is_not_asked_for_a_path(silent, tmp_path):
    for name in (str(tmp_path / "none"), "./none", "~/none-of-this-name", "a/b/c"):
        with pytest.raises(ConfigError, match=all_of("no such folder", "/")):
            load_tokenizer(name)
    assert silent.connections() == 0


def test_hub_offline_is_honoured(silent, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        load_tokenizer("owner/another-name")
    assert silent.connections() == 0


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://no-such-host.invalid", "nonsense", "http://[::"])
def test_hub_problem_of_an_unreachable_address_names_it(address, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    assert hub.hub_problem().startswith(address)
