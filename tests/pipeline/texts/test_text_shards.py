"""Rows of short texts and their shards: split, written, chosen, deduplicated, never followed where numbers lie."""

import gzip
import json
import time

import numpy as np
import pyarrow as pa
import pytest
from messages import says
from preparing import make_pair, rows_of, write_jsonl
from shardfolders import poke, spoil

from declutr.common.errors import ShardError
from declutr.pipeline.job.units import plan_units
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.shards.integrity import content_problem, schema_problem
from declutr.pipeline.shards.manifest import MANIFEST, load_manifest
from declutr.pipeline.shards.shards import ShardSet, check_shards
from declutr.pipeline.shards.windows import Geometry
from declutr.pipeline.texts import sentences


@pytest.fixture
def prepared(tmp_path, make_texts, prepare_units):
    """30 premises with up to three hypotheses in one shard of record batches of 4 rows."""
    rows = [make_pair(f"Premise {n} is here.", f"Hypothesis {k}.", k) for n in range(30) for k in range(1 + n % 3)]
    return prepare_units(make_texts("pairs", write_jsonl(tmp_path / "a.jsonl", *rows), record_batch_rows=4))


def test_the_columns_are_those_of_the_kind_and_a_shard_of_another_kind_is_refused(prepared):
    manifest, ledger, folder = prepared
    shards = ShardSet(folder, "train")
    table = shards.take(np.array([29, 0, 29]))
    assert table.schema.names == ["id", "tokens", "starts", "labels", "num_tokens", "source", "offset"]
    assert table.schema.field("labels").type == pa.list_(pa.int8())
    assert table.column("labels").to_pylist() == [[-1, 0, 1, 2], [-1, 0], [-1, 0, 1, 2]]
    assert table.column("id")[1].as_py() == ledger[0].id
    assert shards.take(np.empty(0, np.int64)).schema.equals(table.schema)
    assert (check_shards(folder, full=True), manifest.content.kind) == ([], "pairs")
    assert b"num_anchors" not in table.schema.metadata
    assert table.schema.metadata[b"content"] == b"pairs"
    assert schema_problem(table.schema, "pairs") is None
    says(schema_problem(table.schema, "documents"), "id, tokens, windows")
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["config"]["content"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match="its columns are"):
        ShardSet(folder, "train").take(np.arange(1))
    for content in ({"kind": "songs"}, "songs", 3, {"kind": "pairs", "premise": []}):
        manifest["config"]["content"] = content
        (folder / MANIFEST).write_text(json.dumps(manifest))
        for read in (load_manifest, lambda folder: ShardSet(folder, "train")):
            with pytest.raises(ShardError, match=r"manifest\.json"):
                read(folder)


def table_of(tokens, starts, labels, num_tokens=None):
    columns = {"tokens": pa.array(tokens, pa.list_(pa.uint16())), "starts": pa.array(starts, pa.list_(pa.int32()))}
    columns |= {"labels": pa.array(labels, pa.list_(pa.int8()))}
    return pa.record_batch(columns | {"num_tokens": pa.array(num_tokens or list(map(len, tokens)), pa.int64())})


GOOD = [[1, 2, 3, 4], [5, 6, 7]], [[0, 2, 3], [0, 1, 2]], [[-1, 0, 2], [-1, 0, 2]]
WRONG = {
    "the first text starts late": ("pairs", 1, {"starts": [[0, 2, 3], [1, 2]], "labels": [[-1, 0, 2], [-1, 0]]}),
    "starts before the row": ("pairs", 0, {"starts": [[-5, 2, 3], [0, 1, 2]]}),
    "an empty text": ("pairs", 0, {"starts": [[0, 2, 2], [0, 1, 2]]}),
    "descending starts": ("pairs", 1, {"starts": [[0, 2, 3], [0, 2, 1]]}),
    "a text at the end": ("pairs", 1, {"starts": [[0, 2, 3], [0, 1, 3]]}),
    "a text far beyond the row": ("triples", 1, {"starts": [[0, 2, 3], [0, 1, 2**30]]}),
    "fewer labels than texts": ("pairs", 1, {"labels": [[-1, 0, 2], [-1, 0]]}),
    "no text": ("pairs", 0, {"starts": [[], [0, 1, 2]], "labels": [[], [-1, 0, 2]]}),
    "a premise alone": ("pairs", 0, {"starts": [[0], [0, 1, 2]], "labels": [[-1], [-1, 0, 2]]}),
    "two texts in a triple": ("triples", 1, {"starts": [[0, 2, 3], [0, 1]], "labels": [[-1, 0, 2], [-1, 0]]}),
    "two sentences": ("sentences", 0, {}),
    "a labelled sentence": ("sentences", 0, {"starts": [[0], [0]], "labels": [[0], [-1]]}),
    "a labelled premise": ("pairs", 1, {"labels": [[-1, 0, 2], [0, 0, 2]]}),
    "an unlabelled hypothesis": ("pairs", 1, {"labels": [[-1, 0, 2], [-1, -1, 2]]}),
    "a label beyond the known ones": ("pairs", 0, {"labels": [[-1, 3, 2], [-1, 0, 2]]}),
    "a triple in another order": ("triples", 1, {"labels": [[-1, 0, 2], [-1, 2, 0]]}),
    "another number of tokens": ("pairs", 1, {"num_tokens": [4, 9]}),
    "a token beyond the vocabulary": ("pairs", 1, {"tokens": [[1, 2, 3, 4], [5, 6, 99]]}),
}


@pytest.mark.parametrize(("windows", "found"), [([0, 4], None), ([0], "1 windows"), ([0, 4, 8], "3 windows")])
def test_a_document_has_the_windows_of_its_length(windows, found):
    columns = {"tokens": pa.array([list(range(9))], pa.list_(pa.uint16())), "num_tokens": pa.array([9], pa.int64())}
    columns["windows"] = pa.array([windows], pa.list_(pa.int32()))
    problem = content_problem(pa.record_batch(columns), Geometry(num_anchors=1, max_tokens=4), "drop", 50)
    assert problem == (found and (0, f"{found}, but its 9 tokens have 2 of 4"))


@pytest.mark.parametrize("name", WRONG)
def test_contradictory_numbers_are_found_before_anything_follows_them(name):
    kind, row, changes = WRONG[name]
    good = dict(zip(("tokens", "starts", "labels"), GOOD, strict=True))
    place, _ = content_problem(table_of(**(good | changes)), Geometry(), "drop", 50, kind)
    assert place == row
    assert content_problem(table_of(*GOOD), Geometry(), "drop", 50, "triples") is None


@pytest.mark.parametrize(
    ("column", "dtype", "changes"),
    [("starts", np.int32, {4: 2**30}), ("starts", np.int32, {1: -7}), ("labels", np.int8, {1: 77})],
)
def test_numbers_poked_into_a_file_are_named_by_the_check_and_the_reader(prepared, column, dtype, changes):
    folder = prepared[2]
    spoil(folder, poke(column, (3, dtype), changes), "train-00000.arrow")
    (problem,) = check_shards(folder, full=True)
    assert "train-00000.arrow: document" in problem
    with pytest.raises(ShardError, match=r"train-00000\.arrow: document"):
        ShardSet(folder, "train").take(np.arange(30))


@pytest.mark.ray
@pytest.mark.usefixtures("session")
def test_copies_and_near_copies_of_rows_are_removed_with_their_texts_shown(tmp_path, make_texts, prepare_units, decode):
    long = [f"Premise about topic {n} " + " ".join(f"word{n}x{k}" for k in range(60)) for n in range(6)]
    rows = [make_pair(premise, "It follows.", 0) for premise in long]
    near = make_pair(long[2] + " indeed", "It follows.", 0)
    write_jsonl(tmp_path / "a.jsonl", *rows)
    write_jsonl(tmp_path / "b.jsonl", rows[1], near, make_pair(long[3], "It follows.", 2))
    changes = {"duplicates": {"exact": True, "near": {"similarity": 0.8}}, "write_rejected": True, "unit_mib": 0.0001}
    manifest, _, folder = prepare_units(make_texts("pairs", tmp_path / "[ab].jsonl", **changes))
    assert (len(manifest.ledgers), manifest.dropped["duplicate"]) == (2, 1)
    assert 1 <= manifest.dropped["near_duplicate"] <= 2
    assert manifest.totals["kept"] == 9 - sum(manifest.dropped.values())
    assert sum(manifest.labels.values()) == manifest.totals["kept"]
    assert [row[:2] for row in decode(folder)[:6]] == [[(text, None), ("It follows.", "entailment")] for text in long]
    with gzip.open(folder / "rejected" / "00001.jsonl.gz") as file:
        rejected = [json.loads(line) for line in file]
    assert rejected[0]["text"] == f"{long[1]}\nIt follows."


def test_rules_and_evaluation_sets_look_at_all_texts_of_a_row(tmp_path, make_texts, output):
    from declutr.pipeline.filters.evaluation_sets import INDEX, build_index

    planted = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    (tmp_path / "questions.txt").write_text(planted + "\n")
    german = "Dieser Satz steht hier auf Deutsch geschrieben.", "Er ist ein deutscher Satz, den man liest."
    rows = ("A premise in English stands here.", "It is a sentence."), ("Another premise in English.", planted), german
    path = write_jsonl(tmp_path / "a.jsonl", *(make_pair(*row, 0) for row in rows))
    contamination = {"paths": [str(tmp_path / "questions.txt")], "action": "drop"}
    filters = {"language": {"keep": ["en"]}, "contamination": contamination}
    config = make_texts("pairs", path, filters=filters, write_rejected=True)
    folder, tokenizer = output
    build_index(config.filters.contamination, folder / INDEX)
    (unit,), _ = plan_units(config.corpus, 1, None, config.content)
    assert write_unit(unit, folder, config, tokenizer).counts.dropped == {"contaminated": 1, "language_other": 1}
    with gzip.open(folder / "rejected" / "00000.jsonl.gz") as file:
        texts = {json.loads(line)["reason"]: json.loads(line)["text"] for line in file}
    assert texts["contaminated"] == f"Another premise in English.\n{planted}"


TEXT = (
    "Dr. Smith went to Washington, D.C. on Jan. 5, 2020. He said it cost $3.50 e.g. for two.\n\n"
    "A heading without an end\n\nIs it 3.14? Yes!   It is 😀. Ok.\n\n\n\nLast one."
)


def test_sentences_of_a_document_have_its_offset_and_all_its_characters(tmp_path, make_texts):
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "First one. Second one."}, {"text": TEXT}, {"text": " "})
    rows = rows_of(make_texts({"kind": "sentences", "split": True}, path))
    assert [(row.text, row.offset) for row in rows[:2]] == [("First one.", 0), ("Second one.", 0)]
    second = path.read_bytes().index(b"\n") + 1
    parts = [row.text for row in rows if row.offset == second]
    assert "".join("".join(parts).split()) == "".join(TEXT.split())
    assert parts[0] == "Dr. Smith went to Washington, D.C. on Jan. 5, 2020."
    assert {"A heading without an end", "Last one."} <= set(parts)
    assert [row.text for row in rows if row.offset > second] == [""]  # counted, and dropped as empty
    path = write_jsonl(tmp_path / "a.jsonl", *({"text": f"Text {n}. It is number {n}."} for n in range(200)))
    content = {"kind": "sentences", "split": True}
    whole, cut = (rows_of(make_texts(content, path, unit_mib=size)) for size in (32, 0.001))
    assert ([(row.text, row.offset) for row in whole], len(whole)) == ([(row.text, row.offset) for row in cut], 400)


def test_every_sentence_is_a_row_with_the_id_of_its_text(tmp_path, make_texts, prepare_units, decode):
    path = tmp_path / "a.txt"
    path.write_text("One text a row. Not split.\n\nAnother  one.\n")
    manifest, ledger, folder = prepare_units(make_texts("sentences", path))
    assert decode(folder) == [[("One text a row. Not split.", None)], [("Another one.", None)]]
    assert (ledger[2].id, manifest.dropped, manifest.labels) == (document_id(b"Another one."), {"empty": 1}, {})
    path.write_text("One text a row. Not split.\n")
    manifest, ledger, folder = prepare_units(make_texts({"kind": "sentences", "split": True}, path))
    assert decode(folder) == [[("One text a row.", None)], [("Not split.", None)]]
    assert [(entry.offset, entry.row) for entry in ledger] == [(0, 0), (0, 1)]


@pytest.mark.parametrize("piece", ["a", ".", "Mr. ", ' "a. ', "(a. ", "a\n\n", "你好。", "a\0b. C"])
def test_no_text_takes_long_or_loses_a_character(piece):
    text = piece * (200_000 // len(piece))
    started = time.process_time()
    found = list(sentences(text, "en"))
    assert time.process_time() - started < 30  # the segmenter alone takes minutes for one of them
    assert "".join("".join(found).split()) == "".join(text.split())
    assert max(map(len, found)) <= 1 << 14


def test_windows_do_not_cut_sentences_and_the_language_changes_the_rules():
    for language, parts in (
        ("en", [f"Sentence number {n} has {n % 13} things in it." for n in range(3000)]),
        ("de", ["Das ist bzw. war gut.", "Der 3. Mai kam."]),
    ):
        assert list(sentences(" ".join(parts), language)) == parts
    assert list(sentences("你好。再见。", "zh")) == ["你好。", "再见。"]
