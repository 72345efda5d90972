"""Wrong uses of `declutr evaluate` and `export`, in a terminal and in Python, which are refused before any scoring."""

import os

import pytest
from messages import says

import declutr
from declutr.cli.main import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "pairs.jsonl").write_text('{"query": "a", "text": "b"}\n{"query": "a", text}\n')
    (tmp_path / "texts.txt").write_text("a text\n")
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("evaluate ./nowhere --pairs pairs.jsonl", ("nowhere", "no such")),
        ("evaluate hashed-words:64 ./nowhere --data data --tasks STS-B", ("nowhere", "no such")),
        ("evaluate texts.txt --pairs data", ("texts.txt is a file; name a folder",)),
        ("evaluate hashed-words:64 --pairs data", ("data: is a folder",)),
        ("evaluate hashed-words:64 --pairs pipe", ("pipe: is a pipe or a device",)),
        ("evaluate hashed-words:64 --pairs pairs.jsonl", ("pairs.jsonl, line 2: is not JSON",)),
        ("evaluate hashed-words:64 --pairs pairs.jsonl --output texts.txt", ("--output texts.txt", "is a file")),
        ("evaluate hashed-words:64 --pairs pairs.jsonl --tasks STS-B --cpus 2", ("--tasks", "with --pairs; omit it")),
        ("evaluate hashed-words:64 --data data --documents texts.txt", ("--documents", "with --data; omit it")),
        ("export hashed-words:64 --to onnx --output new --dimensions 4", ("--dimensions", "with --to onnx; omit it")),
        ("export hashed-words:64 --to static --output new --max-tokens 4", ("--max-tokens", "with --to static")),
    ],
)
def test_a_wrong_line_is_refused_and_writes_nothing(folder, capsys, line, words):
    before = sorted(folder.rglob("*"))
    assert main(line.split()) == 1
    says(capsys.readouterr().err, *words)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pairs": "none.jsonl", "cpus": "2"}, ("cpus = '2': must be of type int",)),
        ({"pairs": "none.jsonl", "trust_remote_code": "yes"}, ("trust_remote_code = 'yes': must be of type bool",)),
        ({"pairs": "none.jsonl", "sizes": [32, 0]}, ("sizes",)),
        ({"data": "data", "tasks": ["STS-B", "unknown"]}, ("--tasks", "unknown")),
        ({"pairs": "none.jsonl", "output": None}, ("none.jsonl: there is no such file",)),
    ],
)
def test_settings_in_python_are_lists_or_numbers_or_refused(settings, words):
    with pytest.raises(declutr.DeclutrError) as error:
        declutr.evaluate("hashed-words:64", **settings)
    says(error.value, *words)


@pytest.mark.usefixtures("folder")
def test_an_encoder_is_named_not_given():
    with pytest.raises(declutr.UsageError, match="is of <class 'object'>; name a file or folder"):
        declutr.evaluate(object(), pairs="pairs.jsonl")
