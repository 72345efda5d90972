"""Wrong uses of `declutr index`, `search`, `evaluate` and `export`, which are refused in words, here and in Python."""

import json
import os
from pathlib import Path

import pytest
from messages import says

import declutr
from declutr.cli.main import main
from declutr.common.errors import UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus with a text a line and one with fields, their embeddings, and an index."""
    place = tmp_path_factory.mktemp("search")
    (place / "a.txt").write_bytes(b"one cat\n\nBread is baked.\r\nlast line\n")
    rows = [{"text": "alpha beta", "url": "u1", "key": "k\n9.000  forged"}, {"text": "gamma bread", "key": "y" * 3000}]
    (place / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = [place / "a.txt", place / "d.jsonl"]
    declutr.embed("hashed-words:64", inputs, place / "e.parquet")
    declutr.embed("hashed-words:64", inputs[1:], place / "ids.parquet", id_field="key")
    declutr.index(place / "e.parquet", place / "index")
    (place / "pairs.jsonl").write_text('{"query": "a", "text": "b"}\n{"query": "a", text}\n')
    (place / "data").mkdir()
    os.mkfifo(place / "pipe")
    return place


def refused(folder, monkeypatch, capsys, line):
    """What a command, whose paths are those of the folder, prints when it ends with status 1."""
    monkeypatch.chdir(folder)
    assert main(line.split()) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("search nowhere bread", ("nowhere: no such folder", "declutr index EMBEDDINGS")),
        ("search bread index", ("name the index, and queries behind it: declutr search index QUERY",)),
        ("search e.parquet bread", ("a file of embeddings, not an index", "declutr index e.parquet --output FOLDER")),
        ("search a.txt bread", ("a.txt: is not an index",)),
        ("index nowhere.parquet --output new", ("nowhere.parquet: no such file",)),
        ("index e.parquet --output index", ("--output index: exists already; name another folder",)),
        ("index e.parquet --output a.txt/new", ("--output a.txt/new:", "a.txt is a file; name a folder")),
        ("index e.parquet --output new --parquet a.txt/m.parquet", ("--parquet a.txt/m.parquet:", "a.txt is a file")),
        ("index e.parquet --output new --source-field urll", ("--source-field urll: 6 of 6 texts have none",)),
        ("index e.parquet --output new --weight 101 --hybrid", ("--weight 101", "from 0 to 100")),
        ("evaluate ./nowhere --pairs pairs.jsonl", ("nowhere", "no such")),
        ("evaluate hashed-words:64 ./nowhere --data data --tasks STS-B", ("nowhere", "no such")),
        ("evaluate a.txt --pairs data", ("a.txt is a file; name a folder",)),
        ("evaluate hashed-words:64 --pairs data", ("data: is a folder",)),
        ("evaluate hashed-words:64 --pairs pipe", ("pipe: is a pipe or a device",)),
        ("evaluate hashed-words:64 --pairs pairs.jsonl", ("pairs.jsonl, line 2: is not JSON",)),
        ("evaluate hashed-words:64 --pairs pairs.jsonl --output a.txt", ("--output a.txt", "is a file")),
        ("evaluate hashed-words:64 --pairs pairs.jsonl --tasks STS-B --cpus 2", ("--tasks", "with --pairs; omit it")),
        ("evaluate hashed-words:64 --pairs pairs.jsonl --cpus 0", ("--cpus 0: must be 1 or more",)),
        ("evaluate hashed-words:64 --data data --documents a.txt", ("--documents", "with --data; omit it")),
        ("export hashed-words:64 --to onnx --output new --dimensions 4", ("--dimensions", "with --to onnx; omit it")),
        ("export hashed-words:64 --to static --output new --max-tokens 4", ("--max-tokens", "with --to static")),
    ],
)
def test_a_wrong_line_is_refused_and_writes_nothing(folder, monkeypatch, capsys, line, words):
    before = sorted(folder.rglob("*"))
    says(refused(folder, monkeypatch, capsys, line), *words)
    assert sorted(folder.rglob("*")) == before


def test_an_index_whose_input_is_gone_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.txt").write_text("a text\n")
    declutr.embed("hashed-words:64", tmp_path / "c.txt", tmp_path / "c.parquet")
    (tmp_path / "c.txt").unlink()
    error = refused(tmp_path, monkeypatch, capsys, "index c.parquet --output new")
    says(error, "c.parquet: its inputs cannot be read again", "c.txt", "put them back, or embed again")


def test_texts_without_the_field_are_counted(folder, log):
    facts, _ = declutr.index(folder / "e.parquet", folder / "by-url", source_field="url")
    assert facts.rows == 6
    says(log, "--source-field url: 5 of 6 texts have none of that name; their file is their source")
    hit, *_ = declutr.search(folder / "by-url", "alpha beta")
    assert (hit.source, hit.number) == ("u1", None)
    hit, *_ = declutr.search(folder / "by-url", "bread baked")  # of a format without fields
    assert (hit.source, hit.number) == ("a.txt", 3)


def test_an_answer_names_the_text_of_its_file_and_an_id_is_one_line(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["search", "index", "bread baked", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("  ", 1)[1] for line in lines} == {
        "d.jsonl text 2  gamma bread",
        "a.txt text 3  Bread is baked.",
    }
    declutr.index("ids.parquet", "ids", source_field="url")
    capsys.readouterr()
    assert main(["search", "ids", "gamma bread"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "y" * 99 + "…  gamma bread" in first
    assert "k 9.000 forged u1  alpha beta" in second


@pytest.mark.parametrize("query", [None, 5, b"bread", ["bread", "cat"], " ", "x" * 100_001])
def test_a_query_that_is_no_text_is_refused_before_the_index_is_opened(query):
    with pytest.raises(UsageError, match="quer"):
        declutr.search("nowhere", query)


@pytest.mark.parametrize("top", [0, "3", 2.5, None])
def test_a_number_of_answers_is_a_whole_number(top):
    with pytest.raises(UsageError, match=r"top = .* whole number"):
        declutr.search("nowhere", "bread", top)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "f4"), ("lexical", "tfidf"), ("weight", "2"), ("source_field", 7), ("hybrid", 2), ("open_addresses", 2)],
)
def test_a_setting_of_another_type_is_refused_before_anything_is_written(folder, name, value):
    shown = repr(value) if name == "weight" else value
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} {shown}: must be"):
        declutr.index(folder / "e.parquet", folder / "new", **{"hybrid": True, name: value})
    assert not (folder / "new").exists()


def test_a_searcher_takes_a_path_as_its_encoder(folder):
    with pytest.raises(declutr.EncoderError, match="nowhere"):
        declutr.Searcher(folder / "index", model=Path("nowhere/encoder"))


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
def test_settings_in_python_are_lists_or_numbers_or_refused(folder, monkeypatch, settings, words):
    monkeypatch.chdir(folder)
    with pytest.raises(declutr.DeclutrError) as error:
        declutr.evaluate("hashed-words:64", **settings)
    says(error.value, *words)


def test_an_encoder_is_named_not_given():
    with pytest.raises(declutr.UsageError, match="'object' object is not iterable; name a file or folder"):
        declutr.evaluate(object(), pairs="pairs.jsonl")
