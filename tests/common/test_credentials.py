"""Credentials in addresses: refused wherever an address is taken, and not to be found in what is said of it."""

import json

import pytest
from messages import all_of

from declutr.cli.main import main as declutr
from declutr.common.config import load_config
from declutr.common.credentials import redact, refusal
from declutr.common.errors import ConfigError, RemoteError
from declutr.common.stores.address import filesystem
from declutr.common.stores.folder import Folder
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import main as prepare_main
from declutr.pipeline.prepare import problems
from declutr.trainer.train import main as train_main

SECRET = "hunter2"
SECRETIVE = [
    f"s3://AKIA123:{SECRET}@bucket/texts",
    f"s3://AKIA123:ab/{SECRET}+x@bucket/texts?region=x",
    f"s3://bucket/texts?secret_key={SECRET}&region=eu",
    f"gs://user:{SECRET}@bucket/x",
    f"https://user:{SECRET}@host/a.jsonl",
    f"https://{SECRET}@host/a.jsonl",
    f"https://host/a.jsonl?X-Amz-Credential=x&X-Amz-Signature={SECRET}",
    f"https://host/a.jsonl?sv=2024&sig={SECRET}",
    f"https://storage/a?X-Goog-Signature={SECRET}#top",
    f"hf://datasets/x/y?token={SECRET}",
    f"simplecache::https://user:{SECRET}@host/a",
    f"s3://bucket/x?endpoint_override=http://a:{SECRET}@host",
    f"ftp://a:{SECRET}@host/x",
]
PLAIN = [
    "s3://bucket/texts?endpoint_override=http://127.0.0.1:9000&region=eu&allow_bucket_creation=true",
    "gs://anonymous@bucket/x",
    "hf://datasets/allenai/c4@607bd4c8/en/a.json.gz",
    "https://host:8080/a@b/c:d.jsonl?download=true",
    "sftp://user@host/path",
    "a text with a: colon @ sign",
    "file:///data/a:b@c",
    "nosuch://x/y",
]


@pytest.mark.parametrize("address", SECRETIVE)
def test_credentials_are_refused_and_not_shown(address):
    assert SECRET not in redact(f"before {address}, after")
    assert SECRET not in (refusal(address) or "")
    assert "environment" in (refusal(address) or "")
    with pytest.raises(PermissionError) as caught:
        filesystem(address)
    with pytest.raises(RemoteError) as other:
        Folder(address).read("")
    assert SECRET not in f"{caught.value} {other.value}"


@pytest.mark.parametrize("address", PLAIN)
def test_other_addresses_are_left_as_they_are(address):
    assert redact(address) == address
    assert refusal(address) is None


def commands(address):
    """Every way in which a command takes an address."""
    return [
        (prepare_main, ["prepare", f"corpus.paths=[{address}]"]),
        (prepare_main, ["prepare", f"corpus.paths=[{address}]", "--plan"]),
        (prepare_main, ["prepare", f"corpus.paths=[{address}", "output=x"]),
        (prepare_main, ["prepare", f"output={address}"]),
        (prepare_main, ["prepare", f"corpus.paths={address}", "corpus.kind=nothing"]),
        (train_main, ["train", f"run={address}"]),
        (train_main, ["train", f"data={address}", "--print-config"]),
        (declutr, ["copy", ".", address]),
        (declutr, ["copy", address, "here"]),
        (declutr, ["inspect", address]),
        (declutr, ["embed", "model", address, "--output", "x"]),
        (declutr, ["prepare", "CONFIG", f"corpus.paths=[{address}]"]),
    ]


@pytest.mark.parametrize("number", range(len(commands(""))))
def test_no_command_takes_or_shows_them(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = {
        "prepare": {
            "output": str(tmp_path / "out"),
            "corpus": {"kind": "files", "paths": ["a.txt"]},
            "tokenizer": {"kind": "train", "vocab_size": 300},
        },
        "train": {"run": "run", "data": "data", "encoder": {"name": "x"}},
    }
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(values))
    for address in SECRETIVE[:3]:
        main, arguments = commands(address)[number]
        given = [str(config) if word in ("prepare", "train", "CONFIG") else word for word in arguments]
        given[0] = arguments[0] if main is declutr else given[0]
        assert main(given) == 1
        told = capsys.readouterr()
        assert "environment" in told.err or "is not YAML" in told.err
        assert SECRET not in told.out + told.err
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_config_file_and_the_api_are_checked_too(tmp_path, make_values):
    values = make_values(SECRETIVE[0])
    (tmp_path / "config.yaml").write_text(json.dumps({"prepare": values}))
    with pytest.raises(ConfigError, match=all_of("corpus.paths = 's3://***@bucket/texts'", "credentials")) as caught:
        load_config(str(tmp_path / "config.yaml"), "prepare", PipelineConfig)
    assert SECRET not in str(caught.value)
    (problem,) = problems(PipelineConfig.model_validate(values))
    assert "holds credentials" in problem
    assert SECRET not in problem


@pytest.fixture
def make_values(tmp_path):
    return lambda path: {
        "output": str(tmp_path / "out"),
        "corpus": {"kind": "files", "paths": [path]},
        "tokenizer": {"kind": "train", "vocab_size": 300},
    }
