"""Pairs and triples: one row a premise, every record accounted for."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import tar, write_records
from mediafiles import spread
from messages import all_of, says
from preparing import make_pair, rows_of, write_jsonl
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from declutr.pipeline import texts as text_rows
from declutr.pipeline.job.outcome import nothing_kept
from declutr.pipeline.job.units import plan_units
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.shards.manifest import sum_counts
from declutr.pipeline.texts import Rejected, row_id
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer

NEEDS = {"kind": "pairs", "required_labels": ["entailment", "contradiction"]}


def test_pairs_of_a_premise_become_one_row_and_without_a_label_none(tmp_path, make_texts, prepare_units, decode):
    rows = [("A man  sleeps.", "He rests.", "entailment"), ("A dog runs.", "It moves.", 0)]
    rows += [("A man\tsleeps. ", "He runs.", "2"), ("A man sleeps.", "He is old.", "neutral")]
    # The first hypothesis again, which stays with another label.
    rows += [("A man sleeps.", "He  rests.", 0), ("A man sleeps.", "He rests.", "neutral")]
    rows += [("A man sleeps.", "He waits.", "-"), ("A man sleeps.", "He waits.", -1)]
    path = write_jsonl(tmp_path / "a.jsonl", *(make_pair(*row) for row in rows))
    manifest, ledger, folder = prepare_units(make_texts("pairs", path))
    man = [("A man sleeps.", None), ("He rests.", "entailment"), ("He runs.", "contradiction")]
    man += [("He is old.", "neutral"), ("He rests.", "neutral")]
    assert decode(folder) == [man, [("A dog runs.", None), ("It moves.", "entailment")]]
    assert manifest.labels == {"contradiction": 1, "entailment": 2, "neutral": 2}
    assert manifest.dropped == {"no_gold_label": 2, "repeated_pair": 1}
    lines = path.read_bytes().split(b"\n")
    offsets = [len(b"\n".join(lines[:n])) + (n > 0) for n in (4, 6, 7, 0, 1)]
    statuses = ["repeated_pair", "no_gold_label", "no_gold_label", "train", "train"]
    assert [(entry.status, entry.offset) for entry in ledger] == list(zip(statuses, offsets, strict=True))
    rows = ("a", "x", 0), ("b", "x", 2), ("c", "x", 0), ("c", "y", 2), ("d", "x", 1)
    path = write_jsonl(tmp_path / "a.jsonl", *(make_pair(*row) for row in rows))
    manifest, _, _ = prepare_units(make_texts(NEEDS, path))
    assert (manifest.totals["kept"], manifest.dropped) == (1, {"lacks_contradiction": 1, "lacks_entailment": 2})
    assert manifest.labels == {"contradiction": 1, "entailment": 1}


def test_a_missing_key_is_named_with_the_found_ones_and_the_setting(tmp_path, make_texts):
    path = write_jsonl(tmp_path / "a.jsonl", {"sentence1": "a", "sentence2": "b", "gold_label": "neutral"})
    (failure,) = rows_of(make_texts("pairs", path))
    assert failure.reason == "missing_key"
    says(failure.message, "'premise'", "gold_label, sentence1, sentence2", "content.premise")
    (tmp_path / "b.csv").write_text("premise,premise,label\na,b,0\n")
    (failure,) = rows_of(make_texts("pairs", tmp_path / "b.csv"))
    says(failure.message, "more than one key 'premise'", "['label', 'premise', 'premise']", "content.premise")
    keys = {"kind": "pairs", "premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"}
    (row,) = rows_of(make_texts(keys, path))
    assert (row.texts, row.labels) == (("a", "b"), (-1, 1))


def test_bom_and_crlf_are_no_part_of_the_texts_and_a_repeated_key_has_its_last_value(tmp_path, make_texts):
    lines = [b'{"premise":"a","hypothesis":"b","label":0}', b'{"premise":"a","hypothesis":"c","label":1}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbfpremise,hypothesis,label\r\na,b,0\r\na,c,1\r\n")
    (tmp_path / "c.jsonl").write_text("\n".join(line.decode() for line in lines), encoding="utf-16")
    assert [row.texts for row in rows_of(make_texts("pairs", tmp_path))] == [("a", "b", "c")] * 3
    repeated = b'{"premise":"a","premise":"b","hypothesis":"h","label":0}'
    (row,) = rows_of(make_texts("pairs", write_jsonl(tmp_path / "a.jsonl", repeated)))
    assert row.texts == (json.loads(repeated)["premise"], "h")


@pytest.mark.parametrize("suffix", ["csv", "tsv", "csv.gz", "jsonl", "jsonl.gz", "parquet", "tar"])
def test_every_format_gives_the_same_rows(suffix, tmp_path, make_texts):
    table = [make_pair("A, b", 'He said "no"', 0), make_pair("A, b", "Two\nlines", 2)]
    table += [make_pair("C", "d", 1), make_pair("C", "e", -1)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "tar":
        path.write_bytes(tar([("x/a.jsonl", write_jsonl(tmp_path / "raw", *table).read_bytes())]))
    else:
        write_records(path, table, 1)
    left, *rows = rows_of(make_texts("pairs", path))
    assert (type(left), left.reason) == (Rejected, "no_gold_label")
    first = ("A, b", 'He said "no"', "Two\nlines"), (-1, 0, 2)
    assert [(row.texts, row.labels) for row in rows] == [first, (("C", "d"), (-1, 1))]


def test_pairs_in_parquet_with_damaged_text_are_failures(tmp_path, make_texts):
    texts = pa.array([b"a", b"\xff", None, b"a"], pa.binary()).view(pa.string())
    table = pa.table({"premise": texts, "hypothesis": ["b", "b", "b", "c"], "label": pa.array([0, 0, 0, 2], pa.int8())})
    pq.write_table(table, tmp_path / "a.parquet")
    wrong, empty, row = rows_of(make_texts("pairs", tmp_path / "a.parquet"))
    assert (wrong.reason, wrong.offset, empty.reason) == ("invalid_utf8", 1, "empty_premise")
    assert row.texts == ("a", "b", "c")
    config = make_texts({"kind": "pairs", "premise": "sentence1"}, tmp_path / "a.parquet")
    says(*plan_units(config.corpus, 1, None, config.content)[1], "content.premise", "'sentence1'")


def test_a_premise_of_two_files_gives_two_rows_and_stays_in_one_split(tmp_path, make_texts, prepare_units, decode):
    for name in "ab":
        rows = [make_pair(f"Premise {n}.{' ' * (name == 'b')}", f"Hypothesis {name}.", 0) for n in range(60)]
        write_jsonl(tmp_path / f"{name}.jsonl", *rows)
    config = make_texts("pairs", tmp_path / "a.jsonl", tmp_path / "b.jsonl", validation_fraction=0.4)
    manifest, _, folder = prepare_units(config)
    assert manifest.totals["kept"] == 120
    train, held = (Counter(row[0][0] for row in decode(folder, split)) for split in ("train", "held-out"))
    assert set(train.values()) == set(held.values()) == {2}
    assert not train.keys() & held.keys()


def test_the_id_depends_on_every_text_and_label():
    ids = {row_id(*row) for row in ((("a", "b"), (-1, 0)), (("a", "b"), (-1, 1)), (("a", "c"), (-1, 0)))}
    ids |= {row_id(("a", "b\nc"), (-1, 0)), row_id(("a\nb", "c"), (-1, 0))}
    assert len(ids) == 5


def test_a_corpus_without_a_row_says_why(tmp_path, make_texts, output):
    def message(content, *rows):
        config = make_texts(content, write_jsonl(tmp_path / "a.jsonl", *rows))
        (unit,), _ = plan_units(config.corpus, 1, None, config.content)
        sidecar = write_unit(unit, output[0], config, output[1])
        return nothing_kept(sum_counts([sidecar.counts]), config, sidecar.failures)

    text = message(NEEDS, make_pair("a", "x", 0), make_pair("b", "x", 0))
    says(text, "2 lacks_contradiction")
    says(text, "content.required_labels = [entailment, contradiction]")
    text = message("pairs", {"sentence1": "a"})
    for words in ("1 missing_key", "content.premise=premise", "found sentence1"):
        assert words in text
    assert "empty" in message("sentences", {"text": ""})


def test_files_of_pairs_of_other_formats_or_too_large_are_refused_and_none_is_cut(tmp_path, make_texts, monkeypatch):
    spread(tmp_path / "in", {"a.jsonl": json.dumps(make_pair("a", "b", 0)).encode(), "README.md": b"about"})
    assert [row.texts for row in rows_of(make_texts("pairs", tmp_path / "in"))] == [("a", "b")]
    config = make_texts("pairs", tmp_path / "in" / "README.md")
    says(*plan_units(config.corpus, 1, None, config.content)[1], "pairs and triples", "jsonl, json, csv, tsv, parquet")
    path = write_jsonl(tmp_path / "a.jsonl", *(make_pair(f"premise {n}", "h" * 100, 0) for n in range(20)))
    monkeypatch.setattr(text_rows, "MAX_FILE_BYTES", 1000)
    with pytest.raises(OSError, match=all_of("a.jsonl", "pairs", "more than")):
        rows_of(make_texts("pairs", path))
    monkeypatch.setattr("declutr.pipeline.job.units.MAX_FILE_BYTES", 1000)
    config = make_texts("pairs", path)
    (problem,) = plan_units(config.corpus, 1, None, config.content)[1]
    says(problem, "split it")
    monkeypatch.undo()
    path = write_jsonl(tmp_path / "a.jsonl", *(make_pair("one premise", f"hypothesis {n}", 0) for n in range(500)))
    for content, parts in (("pairs", 1), ("triples", 10)):
        config = make_texts(content, path)
        units, _ = plan_units(config.corpus, path.stat().st_size / 9.5 / 2**20, None, config.content)
        assert len(units) == parts


def test_triples_are_rows_of_the_file(tmp_path, make_texts, prepare_units, decode):
    path = tmp_path / "nli_for_simcse.csv"
    path.write_text('sent0,sent1,hard_neg\n"A, b.",B.,C.\nD.,E.,\nD.,E.,F.\n,E.,F.\nD.,,F.\nD.,E.,F.\n')
    manifest, _, folder = prepare_units(make_texts("triples", path))
    row = [("D.", None), ("E.", "entailment"), ("F.", "contradiction")]
    assert decode(folder) == [[("A, b.", None), ("B.", "entailment"), ("C.", "contradiction")], row, row]
    assert manifest.dropped == {"empty_contradiction": 1, "empty_entailment": 1, "empty_premise": 1}
    assert manifest.labels == {"contradiction": 3, "entailment": 3}
    path = write_jsonl(tmp_path / "a.jsonl", *({"q": f"q{n}", "pos": "p", "neg": "n"} for n in range(100)))
    content = {"kind": "triples", "premise": "q", "entailment": "pos", "contradiction": "neg"}
    rows = rows_of(make_texts(content, path, unit_mib=0.001))
    assert [row.texts for row in rows] == [(f"q{n}", "p", "n") for n in range(100)]


def test_a_text_without_tokens_drops_its_row(tmp_path, make_texts):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, "[UNK]"))
    backend.normalizer = normalizers.Replace("?", "")
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    tokenizer.save_pretrained(str(tmp_path / "o" / "tokenizer"))
    config = make_texts("pairs", write_jsonl(tmp_path / "a.jsonl", make_pair("a", "?", 0), make_pair("b", "a", 0)))
    (unit,), _ = plan_units(config.corpus, 1, None, config.content)
    sidecar = write_unit(unit, tmp_path / "o", config, describe_tokenizer(tokenizer, "pretrained"))
    assert (sidecar.counts.kept, sidecar.counts.dropped) == (1, {"empty": 1})


def test_pairs_without_labels_are_queries_with_their_texts(tmp_path, make_texts):
    keys = {"kind": "pairs", "premise": "query", "hypothesis": "text", "label": None}
    given = [{"query": "How?", "text": "So."}, {"query": "How?", "text": "Or so.", "label": 2}, {"query": "Why?"}]
    failure, row = rows_of(make_texts(keys, write_jsonl(tmp_path / "a.jsonl", *given)))
    assert (failure.reason, row.texts, row.labels) == ("missing_key", ("How?", "So.", "Or so."), (-1, 0, 0))
    with pytest.raises(ValueError, match=all_of("required_labels", "label = null")):
        make_texts(keys | {"required_labels": ["entailment"]}, tmp_path)
