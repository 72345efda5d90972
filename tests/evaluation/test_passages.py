"""Long texts read whole: passages that fit the encoder, their places and headings, and a search by document."""

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import encoder_folder, jsonl, static_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import all_of, says
from officefiles import KINDS, document
from processes import environment, until
from tokenizers import Tokenizer

import declutr
from declutr.cli.main import main
from declutr.embedding.index import SearchIndex, StoredTexts
from declutr.embedding.note import read_note
from declutr.embedding.passages import Cutter
from declutr.encoders.loading import load_encoder

PAGE = """# Engines

An engine turns heat to work. It has cylinders. Each of them has a piston.

## Cooling

Water takes the heat away. A pump moves it. Without the pump the engine breaks.

```
# no heading, but a comment
```

Parts
=====

The radiator gives heat to the air.
"""


@pytest.fixture(scope="module", params=["bert", "roberta"])
def encoder(request, tmp_path_factory):
    return load_encoder(encoder_folder(tmp_path_factory.mktemp("encoder") / "tiny", family=request.param))


def parts(encoder, text, headings=False):
    return Cutter(encoder, headings).passages(text)


PIECES = ["# A\n", "\n\n", "\n", ". ", "word ", "longerword", "。", "é", "\r\n", "```\n", "x\n===\n", "\0"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=80).map("".join))
@pytest.mark.parametrize("headings", [False, True])
def test_passages_hold_the_whole_text_in_order_and_name_their_lines(encoder, headings, text):
    passages = parts(encoder, text, headings)
    read = "".join(text[passage.start : passage.end] for passage in passages)
    assert "".join(read.split()) == "".join(text.split())
    assert all(first.end <= second.start for first, second in pairwise(passages))
    assert [passage.line for passage in passages] == [1 + text.count("\n", 0, passage.start) for passage in passages]
    _, tokens = encoder.encode_counted([passage.of(text) for passage in passages])
    assert (tokens[:, 0] == tokens[:, 1]).all()


def test_a_passage_ends_at_the_strongest_break_of_its_second_half_and_has_the_headings_above_it(encoder):
    words = " ".join(["word"] * 9)
    for rest, end in (("\n\nmore. words", ""), (". more words", "."), ("\nmore words", ""), ("\n# Next\n", "")):
        text = f"{words}{rest} {words}"
        assert text[: parts(encoder, text)[0].end] == words + end
    cutter = Cutter(encoder, headings=True)
    cutter._limit = 80  # tokens, of which many are letters
    above = [(PAGE[passage.start : passage.end].split("\n")[0], passage.heading) for passage in cutter.passages(PAGE)]
    assert above[0] == ("# Engines", "")
    assert {("## Cooling", "Engines"), ("Parts", "")} < {*above}
    assert {heading for _, heading in above} == {"", "Engines", "Engines > Cooling"}  # no comment of the code


def test_passages_of_a_table_whose_tokenizer_cuts_are_no_longer_than_it_reads(tmp_path):
    folder = static_folder(tmp_path / "table", {"word": [1.0, 2.0]})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(10)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = " ".join(["word"] * 300)
    lengths = [len(passage.of(text).split()) for passage in parts(load_encoder(folder), text)]
    assert sum(lengths) == 300
    assert max(lengths) <= 10


def write_pages(folder):
    folder.mkdir(exist_ok=True)
    (folder / "engine.md").write_text(PAGE)
    filler = "\n\n".join(f"Sentence {number} tells of boats and harbours." for number in range(60))
    (folder / "boats.md").write_text(f"{filler}\n\nThe zeppelin lands at noon.\n\n{filler}")
    return str(folder)


def made(tmp_path, model, *more):
    (output := tmp_path / "pages.parquet").unlink(missing_ok=True)
    assert main(["embed", model, write_pages(tmp_path / "pages"), "--output", str(output), *more]) == 0
    return output


def test_embed_says_what_it_read_and_passages_read_everything(tmp_path, model, capsys):
    output = made(tmp_path, model)
    note = read_note(output)
    assert (note.rows, note.texts_cut) == (2, 2)
    assert 0 < note.tokens_read == 2 * 18 < note.tokens
    shown = capsys.readouterr()
    says(shown.out, f"tokens read: 36 of {note.tokens:,}", "texts cut: 2")
    says(shown.err, "2 texts were cut", "--passages")
    whole = read_note(made(tmp_path, model, "--passages"))
    assert (whole.texts_cut, whole.tokens_read) == (0, whole.tokens)
    assert abs(whole.tokens - note.tokens) < 0.2 * note.tokens
    table = pq.read_table(output)
    assert table.column_names == ["row", "start", "end", "line", "heading", "embedding"]
    assert table.num_rows == whole.rows > 20
    pq.write_table(table.slice(1).drop_columns(["line"]), output)  # altered, with a note that fits it
    path = output.with_name(f"{output.name}.json")
    path.write_text(whole.model_copy(update={"num_bytes": output.stat().st_size}).model_dump_json())
    with pytest.raises(declutr.UsageError, match=all_of("pages.parquet", "embed again")):
        declutr.index(output, tmp_path / "index")


@pytest.mark.parametrize("hybrid", [(), ("--hybrid", "--lexical", "bm25")])
def test_a_search_names_each_document_once_with_its_best_passage(tmp_path, model, hybrid, capsys):
    output = made(tmp_path, model, "--passages", "--headings", "--unit-mib", "0.0001")
    assert main(["index", str(output), "--output", str(tmp_path / "index"), *hybrid]) == 0
    says(capsys.readouterr().out, "passages", "index")
    index = SearchIndex(tmp_path / "index")
    encoder = load_encoder(model)
    texts = [index.texts([row])[0] for row in range(index.facts.rows)]
    for text in texts:
        source = (tmp_path / "pages" / text.source).read_text()
        assert text.text in source
        assert text.text.split("\n")[0] in source.splitlines()[text.line - 1]
    for query in ("zeppelin", "engine pump"):
        hits = index.hits(index.embed(encoder, query), 10, query)
        assert len(hits) == 2
        for hit in hits:
            of_document = [row for row, text in enumerate(texts) if text.source == hit.source]
            cosines, lexical = index.parts(index.embed(encoder, query), query)
            assert hit.row == max(of_document, key=lambda row: cosines[row] + index.weight * lexical[row])
    assert main(["search", str(tmp_path / "index"), "zeppelin"]) == 0
    shown = capsys.readouterr().out
    if hybrid:
        says(shown, "boats.md line 121", "The zeppelin")
        assert shown.index("boats.md") < shown.index("engine.md")
    assert shown.count("boats.md") == shown.count("engine.md") == 1


def test_a_weight_is_chosen_on_documents_not_on_passages(tmp_path, model):
    jsonl(tmp_path / "in.jsonl", [{"id": f"d{n}", "text": f"number{n} " * 40} for n in range(40)])
    jsonl(tmp_path / "pairs.jsonl", [{"query": f"number{n}", "id": f"d{n}"} for n in range(40)])
    output = tmp_path / "out.parquet"
    declutr.embed(model, tmp_path / "in.jsonl", output, passages=True, id_field="id")
    built = declutr.index(output, tmp_path / "index", hybrid=True, pairs=tmp_path / "pairs.jsonl")
    assert built.facts.rows > 80
    assert built.choice.values["words alone"].mean() == 1
    assert declutr.search(tmp_path / "index", "number7", top=1)[0].id == "d7"


def test_what_passages_need_is_said_at_once_and_their_tokens_are_counted(tmp_path, model, refused):
    pages = write_pages(tmp_path / "pages")
    for encoder, output, more, words in (
        (model, "a.npy", ["--passages"], ("--passages", ".parquet")),
        (model, "a.parquet", ["--headings"], ("--headings", "--passages")),
        ("hashed-words:8", "a.parquet", ["--passages"], ("hashed-words:8", "--passages", "omit")),
    ):
        refused(["embed", encoder, pages, "--output", tmp_path / output, *more], *words)
        assert [path.name for path in tmp_path.iterdir()] == ["pages"]
    encoder, texts = load_encoder(model), ["word " * 50, "", "word"]
    embeddings, tokens = encoder.encode_counted(texts)
    assert tokens.tolist() == [[52, 18], [0, 0], [2, 2]]  # without special ones
    np.testing.assert_array_equal(embeddings, encoder.encode(texts))
    assert load_encoder(model, long_texts="windows").encode_counted(texts[:1])[1].tolist() == [[52, 52]]
    assert encoder.encode_counted([])[1].shape == (0, 2)


def test_records_of_passages_that_were_altered_are_refused(tmp_path, model):
    declutr.index(made(tmp_path, model, "--passages"), tmp_path / "index")
    path = tmp_path / "index" / "texts.arrow"
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    for records in ([None], [-1], [5, 0]):
        altered = pa.array([*records, *table["record"].to_pylist()[len(records) :]], pa.int64())
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table.set_column(0, table.schema.field(0), altered))
        with pytest.raises(declutr.UsageError, match=all_of("texts.arrow", "build the index again")):
            StoredTexts(path, table.num_rows, passages=True).first_rows()


def test_a_searcher_answers_threads_and_refuses_what_the_command_refuses(tmp_path, model):
    from concurrent.futures import ThreadPoolExecutor

    output = made(tmp_path, model, "--passages")
    declutr.index(output, tmp_path / "index", hybrid=True, weight=2.0)
    searcher = declutr.Searcher(tmp_path / "index")
    assert searcher.weight == 2
    alone = [searcher.search(query, 1) for query in ("pump", "harbours")]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda query: searcher.search(query, 1), ["pump", "harbours"] * 8)) == alone * 8
    assert declutr.search(tmp_path / "index", "pump", 1, weight=2.0) == alone[0]
    for call, words in (
        (lambda: searcher.search("pump", 0), ("top = 0", "1")), (lambda: searcher.search(" "), ("empty",)),
        (lambda: declutr.Searcher(tmp_path / "nowhere"), ("nowhere", "declutr index")),
        (lambda: declutr.Searcher(tmp_path / "index", model="hashed-words:8"), ("hashed-words:8", "different vectors")),
        (lambda: declutr.index(output, tmp_path / "b", weight=1), ("--weight", "--hybrid")),
        (lambda: declutr.index(output, tmp_path / "b", hybrid=True, weight=101), ("101", "100")),
        (lambda: declutr.index(tmp_path / "pages", tmp_path / "b"), ("is a folder", "declutr embed")),
        (lambda: declutr.evaluate(model), ("data", "pairs")),
        (lambda: declutr.evaluate(model, pair="x"), ("pair: unknown key", "pairs")),
        (lambda: declutr.evaluate(model, data="x", protocol="y"), ("protocol", "senteval")),
        (lambda: declutr.evaluate(model, data=""), ("data", "empty path", "name a file or a folder")),
        (lambda: declutr.evaluate(model, pairs="$NOT_SET/x"), ("pairs", "$NOT_SET", "is not set")),
        (lambda: declutr.export(model, tmp_path / "b", to="x"), ("to = 'x'", "onnx")),
    ):  # fmt: skip
        with pytest.raises(declutr.DeclutrError, match=all_of(*words)):
            call()


def test_evaluate_in_python_returns_what_the_command_writes(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setattr("time.time_ns", lambda: 2**62)  # the clock of a server that holds the files is behind
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "mteb.json").write_text('{"of": "an earlier call"}')
    pairs = [{"query": f"boat {number}", "text": f"A boat with the number {number}."} for number in range(30)]
    figures = declutr.evaluate(model, pairs=jsonl(tmp_path / "pairs.jsonl", pairs), output=tmp_path / "scores")
    assert figures == {"pairs": json.loads((tmp_path / "scores" / "pairs.json").read_text())}
    says(capsys.readouterr().out, "BM25")


def test_the_service_of_the_guide_answers_a_request_and_again_after_a_restart(tmp_path, model):
    declutr.index(made(tmp_path, model, "--passages"), tmp_path / "index", hybrid=True)
    page = (Path(declutr.__file__).parents[2] / "docs" / "guides" / "search.md").read_text()
    (tmp_path / "service.py").write_text(page.split("```python\n")[1].split("```")[0])

    def answers_at(port):
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    answers = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "flask", "--app", "service", "run", "--port", str(port)]
        with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL) as service:
            try:
                address = f"http://127.0.0.1:{port}/search?q="
                until(lambda port=port: answers_at(port), "the service")
                answers.append(json.load(urllib.request.urlopen(f"{address}zeppelin&top=1")))
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(address)
                says(json.load(refused.value)["error"], "query is empty")
            finally:
                service.terminate()
    assert answers[0] == answers[1]
    assert [(hit["source"], hit["line"]) for hit in answers[0]] == [("boats.md", 121)]


def test_630_documents_of_six_kinds_are_found_from_python(tmp_path, model):
    (tmp_path / "in").mkdir()
    for number in range(630):
        kind, body = KINDS[number % 6], f"The lever n{number} opens the valve. " + "It is of brass. " * 12
        (tmp_path / "in" / f"{number:03d}.{kind}").write_bytes(document(kind, f"Machine {number}", body))
    settings = {"passages": True, "headings": True, "format": "auto_text_file", "workers": 0}
    note = declutr.embed(model, tmp_path / "in", tmp_path / "in.parquet", **settings)
    assert (note.skipped, note.texts_cut) == ({}, 0)
    built = declutr.index(tmp_path / "in.parquet", tmp_path / "index", hybrid=True, weight=100)
    assert built.facts.rows == note.rows > 630
    searcher = declutr.Searcher(tmp_path / "index")
    assert len({hit.record for hit in searcher.search("brass", top=1000)}) == 630
    for number in range(0, 630, 35):
        (hit,) = searcher.search(f"n{number}", top=1)
        assert hit.source.startswith(f"{number:03d}.")
