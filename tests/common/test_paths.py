"""Paths, addresses and names on the hub as people write them: expanded, refused, and without their secrets."""

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from huggingface_hub import constants
from messages import all_of, says
from processes import run_python

from declutr.cli.main import main as declutr
from declutr.common import hub
from declutr.common.config import load_config
from declutr.common.errors import ConfigError, RemoteError, UsageError, redact, refusal
from declutr.common.hub import looks_like_a_path
from declutr.common.paths import check_there, expand, folder_problem, path_argument
from declutr.common.stores.address import filesystem
from declutr.common.stores.folder import Folder
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import main as prepare_main
from declutr.pipeline.prepare import problems
from declutr.pipeline.readers.corpus import HubCorpus
from declutr.pipeline.readers.inputs import find_inputs, hub_inputs
from declutr.pipeline.readers.skipped import Skipped
from declutr.pipeline.tokenizer.tokenization import load_tokenizer
from declutr.trainer.train import main as train_main


def test_home_and_variables_are_expanded_unless_the_name_exists(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINE", "runs")
    assert expand("~/x") == tmp_path / "x"
    assert path_argument("~/$MINE/${MINE}") == tmp_path / "runs" / "runs"
    for path in ("a b\né", "./s3:/x", "runs/12:30"):
        assert expand(path) == Path(path)
    monkeypatch.chdir(tmp_path)
    Path("$NOT_SET").mkdir()
    assert expand("$NOT_SET") == Path("$NOT_SET")


@pytest.mark.parametrize(
    "path", ["", " ", "a\0b", "$NOT_SET/x", "${NOT_SET}", "~no-such-user/x", "s3:/bucket/x", "file:/tmp/x", "C:\\x"]
)
def test_path_that_names_no_place_is_refused(path, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(UsageError):
        expand(path)
    with pytest.raises(argparse.ArgumentTypeError):
        path_argument(path)


@pytest.mark.skipif(os.getuid() != 0, reason="takes the identity of a user without a home folder")
def test_path_without_any_home_is_refused():
    code = "from declutr.common.paths import expand\nimport os; os.setuid(54321)\nexpand('~/x')"
    bare = {name: None for name in os.environ if name not in ("PATH", "PYTHONPATH")}
    says(run_python("-c", code, env=bare, check=False).stderr, ".UsageError", "'~/x'", "home folder")


def test_folder_problem_names_what_is_in_the_way(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "link of a file").symlink_to(__file__)
    before = sorted(tmp_path.rglob("*"))
    assert {folder_problem(tmp_path), folder_problem(tmp_path / "a" / "b")} == {None}
    for name in ("file", "file/below"):
        says(folder_problem(tmp_path / name), "a file", "folder")
    says(folder_problem(tmp_path / "link"), "link to nothing")
    says(folder_problem(tmp_path / "link of a file"), "is a file; name a folder")
    says(folder_problem(tmp_path / ("x" * 300)), "too long")
    if sys.platform == "linux":  # the system is asked, not the permissions
        says(folder_problem(Path("/proc/nope")), "/proc")
    assert sorted(tmp_path.rglob("*")) == before


def test_hub_is_asked_once_and_not_for_a_path_or_offline(tmp_path, monkeypatch):
    """A hub that takes every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(hub, "PATIENCE_SECONDS", 1.0)
        for name in (str(tmp_path / "none"), "./none", "~/none-of-this-name", "a/b/c"):
            with pytest.raises(ConfigError, match=all_of("no such folder", "/")):
                load_tokenizer(name)
        with patch.object(constants, "HF_HUB_OFFLINE", True), pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
            load_tokenizer("owner/another-name")
        with pytest.raises(BlockingIOError):  # no connection
            server.accept()
        says(hub.hub_problem(), "not answer")
        with pytest.raises(ConfigError, match=all_of("folder", "cache", "no copy", "not answer")):
            load_tokenizer("owner/none-of-this-name")
        with pytest.raises(OSError, match="does not answer"):
            list(find_inputs("hf://datasets/owner/none/x.txt", Skipped()))
        _, (problem,) = hub_inputs(HubCorpus(kind="hub", name="owner/none"))
        assert "corpus.name = 'owner/none'" in problem
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):  # no second one
            server.accept()


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://no-such-host.invalid", "nonsense", "http://[::"])
def test_hub_problem_of_an_unreachable_address_names_it(address, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    assert hub.hub_problem().startswith(address)


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
    assert "environment" in refusal(address)
    with pytest.raises(PermissionError) as caught:
        filesystem(address)
    with pytest.raises(RemoteError) as other:
        Folder(address).read("")
    assert SECRET not in f"{redact(f'before {address}, after')} {refusal(address)} {caught.value} {other.value}"


def test_other_addresses_are_left_as_they_are_and_searched_in_time_that_grows_with_their_length():
    assert [redact(address) for address in PLAIN] == PLAIN
    assert [refusal(address) for address in PLAIN] == [None] * len(PLAIN)
    for text in ("s3://" + ":" * 20_000, "x://" + ":" * 20_000, "x://h" + "?" * 20_000, "s3://:" * 400):
        began = time.process_time()
        assert redact(text) == text
        assert time.process_time() - began < 0.5, text[:6]


def test_names_the_hub_can_have_and_names_that_can_only_be_paths():
    paths = ["/a", "./a", "../a", "~/a", "a/b/c", "a/", ".", "a b", "$A/b", "a\\b", ""]
    names = ["distilroberta-base", "sentence-transformers/all-MiniLM-L6-v2", "a.b/c_d.e"]
    assert [name for name in paths + names if looks_like_a_path(name)] == paths


def values_of(path):
    tokenizer = {"kind": "train", "vocab_size": 300}
    return {"output": "out", "corpus": {"kind": "files", "paths": [path]}, "tokenizer": tokenizer}


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (prepare_main, "corpus.paths=[{}]"),
        (prepare_main, "corpus.paths=[{}] --plan"),
        (prepare_main, "corpus.paths=[{} output=x"),
        (prepare_main, "output={}"),
        (prepare_main, "corpus.paths={} corpus.kind=nothing"),
        (train_main, "run={}"),
        (train_main, "data={} --print-config"),
        (declutr, "copy {} here"),
        (declutr, "embed model {} --output x"),
        (declutr, "prepare CONFIG corpus.paths=[{}]"),
    ],
)
def test_no_command_takes_or_shows_them(main, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = {"prepare": values_of("a.txt"), "train": {"run": "run", "data": "data", "encoder": {"name": "x"}}}
    Path("CONFIG").write_text(json.dumps(values))
    for address in SECRETIVE[:3]:
        assert main(["CONFIG"] * (main is not declutr) + words.format(address).split()) == 1
        out, err = capsys.readouterr()
        assert "environment" in err or "is not YAML" in err
        assert SECRET not in out + err
    assert [path.name for path in tmp_path.iterdir()] == ["CONFIG"]


def test_a_config_file_and_the_api_are_checked_too(tmp_path):
    values = values_of(SECRETIVE[0])
    (tmp_path / "config.yaml").write_text(json.dumps({"prepare": values}))
    with pytest.raises(ConfigError, match=all_of("corpus.paths = 's3://***@bucket/texts'", "credentials")) as caught:
        load_config(str(tmp_path / "config.yaml"), "prepare", PipelineConfig)
    (problem,) = problems(PipelineConfig.model_validate(values))
    assert "holds credentials" in problem
    assert SECRET not in f"{caught.value}{problem}"


def test_paths_that_are_not_there_are_named_all_at_once_with_the_nearest_name(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to("nowhere")  # a broken link is a problem of its reader
    there = [tmp_path / "notes", str(tmp_path / "*.md"), "s3://bucket/x", None, tmp_path / "link"]
    check_there(there)
    with pytest.raises(UsageError) as caught:
        check_there([*there, str(tmp_path / "nots"), str(tmp_path / "notes/zzz")])
    first, second = str(caught.value).splitlines()
    says(first, tmp_path / "nots", "no such file or folder", "did you mean", tmp_path / "notes")
    says(second, tmp_path / "notes/zzz")
    assert "did you mean" not in second


def test_quoted_names_with_commas_are_left_to_the_reader_of_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a,b.jsonl").write_text('{"text": "words"}')
    Path("c.yaml").write_text("prepare: {}")
    assert declutr(["prepare", "c.yaml", 'corpus.paths=["a,b.jsonl"]', "--print-config"]) == 1
    assert "no such file" not in capsys.readouterr().err


WRONG_PATHS = """
prepare nothere.yaml
prepare configs/cpu-small.yaml corpus.paths=[nothere] output=p
train nothere.yaml
train configs/cpu-small.yaml data=nothere run=r
verify-gradients nothere.yaml
doctor nothere.yaml
embed hashed-words:8 nothere --output a.npy
embed ./nothere README.md --output a.npy
adapt ./nothere docs --output o
adapt start nothere --output o
export ./nothere --to onnx --output x
evaluate hashed-words:8 --pairs nothere
evaluate hashed-words:8 --data nothere
index nothere.parquet --output i
search nothere word
inspect nothere
why nothere --step 1
report nothere
"""
REFUSE = """import sys
from declutr.cli.main import main
status = main(sys.argv[1:])
print(status, sorted({"pyarrow", "torch", "transformers", "ray"} & set(sys.modules)))
"""


@pytest.mark.parametrize("command", WRONG_PATHS.split("\n")[1:-1])
def test_wrong_path_is_named_before_large_libraries_are_loaded(command):
    done = run_python("-c", REFUSE, *command.split(), check=False)
    assert done.stdout.split("\n")[-2] == "1 []"
    assert "nothere" in done.stderr
