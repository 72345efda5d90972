"""Pairs and triples: one row a premise, every record accounted for."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import tar, write_records
from messages import all_of, says
from preparing import make_pair, rows_of, write_jsonl

from declutr.pipeline import texts as text_rows
from declutr.pipeline.job.outcome import nothing_kept
from declutr.pipeline.job.units import plan_units
from declutr.pipeline.shards.manifest import sum_counts
from declutr.pipeline.texts import Rejected, row_id


def test_pairs_of_a_premise_become_one_row(tmp_path, make_texts, prepare_units, decode):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        make_pair("A man  sleeps.", "He rests.", "entailment"),
        make_pair("A dog runs.", "It moves.", 0),
        make_pair("A man\tsleeps. ", "He runs.", "2"),
        make_pair("A man sleeps.", "He is old.", "neutral"),
        make_pair("A man sleeps.", "He  rests.", 0),  # the first hypothesis again
        make_pair("A man sleeps.", "He rests.", "neutral"),  # the same text with another label stays
        make_pair("A man sleeps.", "He waits.", "-"),
        make_pair("A man sleeps.", "He waits.", -1),
    )
    manifest, ledger, folder = prepare_units(make_texts("pairs", path))
    assert decode(folder) == [
        [
            ("A man sleeps.", None),
            ("He rests.", "entailment"),
            ("He runs.", "contradiction"),
            ("He is old.", "neutral"),
            ("He rests.", "neutral"),
        ],
        [("A dog runs.", None), ("It moves.", "entailment")],
    ]
    assert manifest.labels == {"contradiction": 1, "entailment": 2, "neutral": 2}
    assert manifest.dropped == {"no_gold_label": 2, "repeated_pair": 1}
    assert manifest.totals["read"] == 5
    offsets = [len(b"\n".join(path.read_bytes().split(b"\n")[:n])) + (n > 0) for n in range(8)]
    assert [(entry.status, entry.offset) for entry in ledger] == [
        ("repeated_pair", offsets[4]),
        ("no_gold_label", offsets[6]),
        ("no_gold_label", offsets[7]),
        ("train", offsets[0]),
        ("train", offsets[1]),
    ]


def test_a_missing_key_is_named_with_the_found_ones_and_the_setting(tmp_path, make_texts):
    path = write_jsonl(tmp_path / "a.jsonl", {"sentence1": "a", "sentence2": "b", "gold_label": "neutral"})
    (failure,) = rows_of(make_texts("pairs", path))
    assert failure.reason == "missing_key"
    assert "'premise'" in failure.message
    assert "gold_label, sentence1, sentence2" in failure.message
    assert "content.premise" in failure.message
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
    given = [("A, b", 'He said "no"', 0), ("A, b", "Two\nlines", 2), ("C", "d", 1), ("C", "e", -1)]
    path = tmp_path / f"a.{suffix}"
    columns = ("premise", "hypothesis", "label")
    table = [dict(zip(columns, row, strict=True)) for row in given]
    if suffix == "tar":
        path.write_bytes(tar([("x/a.jsonl", write_jsonl(tmp_path / "raw", *table).read_bytes())]))
    else:
        write_records(path, table, 1)
    left, *rows = rows_of(make_texts("pairs", path))
    assert (type(left), left.reason) == (Rejected, "no_gold_label")
    assert [(row.texts, row.labels) for row in rows] == [
        (("A, b", 'He said "no"', "Two\nlines"), (-1, 0, 2)),
        (("C", "d"), (-1, 1)),
    ]


def test_pairs_in_parquet_with_damaged_text_are_failures(tmp_path, make_texts):
    texts = pa.array([b"a", b"\xff", None, b"a"], pa.binary()).view(pa.string())
    table = pa.table({"premise": texts, "hypothesis": ["b", "b", "b", "c"], "label": pa.array([0, 0, 0, 2], pa.int8())})
    pq.write_table(table, tmp_path / "a.parquet")
    wrong, empty, row = rows_of(make_texts("pairs", tmp_path / "a.parquet"))
    assert (wrong.reason, wrong.offset, empty.reason, row.texts) == (
        "invalid_utf8",
        1,
        "empty_premise",
        ("a", "b", "c"),
    )
    config = make_texts({"kind": "pairs", "premise": "sentence1"}, tmp_path / "a.parquet")
    (problem,) = plan_units(config.corpus, 1, None, config.content)[1]
    assert "content.premise" in problem
    assert "'sentence1'" in problem


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


def test_needs_drops_premises_that_lack_a_label(tmp_path, make_texts, prepare_units):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        make_pair("a", "x", 0),
        make_pair("b", "x", 2),
        make_pair("c", "x", 0),
        make_pair("c", "y", 2),
        make_pair("d", "x", 1),
    )
    config = make_texts({"kind": "pairs", "required_labels": ["entailment", "contradiction"]}, path)
    manifest, _, _ = prepare_units(config)
    assert manifest.totals["kept"] == 1
    assert manifest.dropped == {"lacks_contradiction": 1, "lacks_entailment": 2}
    assert manifest.labels == {"contradiction": 1, "entailment": 1}


def test_a_corpus_without_a_row_says_why(tmp_path, make_texts, output):
    from declutr.pipeline.job.worker import write_unit

    def message(content, *rows):
        config = make_texts(content, write_jsonl(tmp_path / "a.jsonl", *rows))
        (unit,), _ = plan_units(config.corpus, 1, None, config.content)
        sidecar = write_unit(unit, output[0], config, output[1])
        return nothing_kept(sum_counts([sidecar.counts]), config, sidecar.failures)

    needs = {"kind": "pairs", "required_labels": ["entailment", "contradiction"]}
    told = message(needs, make_pair("a", "x", 0), make_pair("b", "x", 0))
    assert "2 lacks_contradiction" in told
    says(told, "content.required_labels = [entailment, contradiction]")
    told = message("pairs", {"sentence1": "a"})
    assert "1 missing_key" in told
    assert "content.premise=premise" in told
    assert "found sentence1" in told
    assert "empty" in message("sentences", {"text": ""})


def test_pairs_in_files_of_other_formats_or_too_large_are_refused(tmp_path, make_texts, monkeypatch):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", make_pair("a", "b", 0))
    (tmp_path / "in" / "README.md").write_text("about")
    assert [row.texts for row in rows_of(make_texts("pairs", tmp_path / "in"))] == [("a", "b")]
    config = make_texts("pairs", tmp_path / "in" / "README.md")
    (problem,) = plan_units(config.corpus, 1, None, config.content)[1]
    says(problem, "pairs and triples", "jsonl, json, csv, tsv, parquet")
    path = write_jsonl(tmp_path / "a.jsonl", *(make_pair(f"premise {n}", "h" * 100, 0) for n in range(20)))
    monkeypatch.setattr(text_rows, "MAX_FILE_BYTES", 1000)
    with pytest.raises(OSError, match=all_of("a.jsonl", "pairs", "more than")):
        rows_of(make_texts("pairs", path))
    monkeypatch.setattr("declutr.pipeline.job.units.MAX_FILE_BYTES", 1000)
    config = make_texts("pairs", path)
    (problem,) = plan_units(config.corpus, 1, None, config.content)[1]
    says(problem, "split it")


def test_a_file_of_pairs_is_never_cut(tmp_path, make_texts):
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
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from declutr.pipeline.job.worker import write_unit
    from declutr.pipeline.tokenizer.tokenization import describe_tokenizer

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, "[UNK]"))
    backend.normalizer = normalizers.Replace("?", "")
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    made.save_pretrained(str(tmp_path / "o" / "tokenizer"))
    path = write_jsonl(tmp_path / "a.jsonl", make_pair("a", "?", 0), make_pair("b", "a", 0))
    config = make_texts("pairs", path)
    (unit,), _ = plan_units(config.corpus, 1, None, config.content)
    sidecar = write_unit(unit, tmp_path / "o", config, describe_tokenizer(made, "pretrained"))
    assert (sidecar.counts.kept, sidecar.counts.dropped) == (1, {"empty": 1})


def test_pairs_without_labels_are_queries_with_their_texts(tmp_path, make_texts):
    keys = {"kind": "pairs", "premise": "query", "hypothesis": "text", "label": None}
    given = [{"query": "How?", "text": "So."}, {"query": "How?", "text": "Or so.", "label": 2}, {"query": "Why?"}]
    (failure,) = (rows := rows_of(make_texts(keys, write_jsonl(tmp_path / "a.jsonl", *given))))[:1]
    assert (failure.reason, [(row.texts, row.labels) for row in rows[1:]]) == (
        "missing_key",
        [(("How?", "So.", "Or so."), (-1, 0, 0))],
    )
    with pytest.raises(ValueError, match=all_of("required_labels", "label = null")):
        make_texts(keys | {"required_labels": ["entailment"]}, tmp_path)
