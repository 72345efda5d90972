"""`evaluate --pairs` and NanoBEIR: files, tables and measures, against plain writings and sentence-transformers."""

import csv
import itertools
import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import jsonl, static_folder
from messages import all_of, says
from nanofiles import rows_of, write_test
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sklearn.metrics import ndcg_score

from declutr.cli.main import main
from declutr.common.errors import DataError
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import CutEncoder
from declutr.evaluation.retrieval.compare import MEASURES, RetrievalScores, differences, measures, score_encoder
from declutr.evaluation.retrieval.lexicon import Lexicon
from declutr.evaluation.retrieval.nanobeir import NAMES, read_nanobeir, score_nanobeir, split_names
from declutr.evaluation.retrieval.pairs import RetrievalTest, read_test

READ = {
    "a query twice": ([("a", "x"), ("b", "y"), ("a", "y")], None, (["a", "b"], ["x", "y"], [[0, 1], [1]])),
    "documents that no pair names": (
        [("a", 7), ("c", 8)], [(6, "text 6"), (7, "text 7"), (8, "text 8")],
        (["a", "c"], ["text 6", "text 7", "text 8"], [[1], [2]])),
    "several texts of an id": (
        [("a", 1), ("b", 2)], [(1, "cat"), (2, "fish"), (1, "bird"), (1, "cat")],
        (["a", "b"], ["cat", "fish", "bird"], [[0, 2], [1]])),
    # Two of the same text would tie: no query of them could find its own first.
    "ids with the same text": (
        [("a", 1), ("b", 2), ("c", 3)], [(1, "cat"), (2, "fish"), (3, "cat")],
        (["a", "b", "c"], ["cat", "fish"], [[0], [1], [0]])),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_read_test_joins_queries_and_searches_every_text_once(tmp_path, name):
    pairs, documents, expected = READ[name]
    target = "text" if documents is None else "id"
    path = jsonl(tmp_path / "pairs.jsonl", [{"query": query, target: value} for query, value in pairs])
    rows = documents and jsonl(tmp_path / "documents.jsonl", [{"id": key, "text": text} for key, text in documents])
    test = read_test(path, rows)
    assert (test.queries, test.texts, test.relevant) == expected


def test_read_test_of_csv_keeps_commas_in_quotes_and_takes_texts_beyond_the_limit_of_the_csv_module(tmp_path):
    (tmp_path / "pairs.csv").write_text('\ufeffquery,text,more\n"a, ""b""",x,\nc,y,\n', encoding="utf-8")
    assert read_test(tmp_path / "pairs.csv").queries == ['a, "b"', "c"]
    (tmp_path / "pairs.csv").write_text(f"query,text\na,{'x' * 200_000}\nb,y\n")
    limit = csv.field_size_limit(131_072)
    try:
        assert [len(text) for text in read_test(tmp_path / "pairs.csv").texts] == [200_000, 1]
    finally:
        csv.field_size_limit(limit)


POOR = [
    ("pairs.jsonl", b'{"query": "a", "txt": "b"}', ("text", "query, txt")),
    ("pairs.jsonl", b'{"query": "a", "text": ""}', ("pairs.jsonl", "line 1", "`text`", "''")),
    ("pairs.jsonl", b'{"query": "a", "text": "b"}\n{"query": null, "text": "b"}', ("line 2", "`query`", "'None'")),
    ("pairs.jsonl", b"", "no pairs"), ("pairs.jsonl", b'["query", "text"]', ("line 1", "list", "object")),
    ("pairs.jsonl", b'{"query": "a", "text": "b"}', "one text"),
    ("pairs.jsonl", b'{"query": "a", "text": "cat \\ud83d"}', ("line 1", "`text`", "half of a character")),
    ("a.jsonl", b"{", "line 1: is not JSON"), ("a.jsonl", b"\xff\n", "UTF-8"), ("a.csv", b"\xff,\n1,2\n", "UTF-8"),
    ("a.csv", b'query,text\n1,"a "b" c"\n', ("CSV", '"')),
    ("a.tsv", b'query\ttext\n1\t"a\n2\tb\n3\tc"\n', ("line 4", '""')),
    ("pairs.csv", b"query,text\na,b,\nwhat,it is this, and that\n", ("line 3", "quotes", "','")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "told"), POOR)
def test_read_test_of_a_poor_file_names_the_place(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=all_of(told)):
        read_test(tmp_path / name)


def test_read_test_names_pairs_without_a_document(tmp_path):
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"query": "a", "id": n} for n in range(8)])
    documents = jsonl(tmp_path / "documents.jsonl", [{"id": n, "text": f"text {n}"} for n in range(2)])
    with pytest.raises(DataError, match=all_of("6 of 8 pairs", "line 3: 2", "1 more")):
        read_test(pairs, documents)


def test_measures_of_embeddings_that_are_not_finite_are_refused_and_collapsed_ones_named(tmp_path, refused, log):
    model = static_folder(tmp_path / "words", {"cat": [math.nan, 1], "dog": [0.5, 1], "fish": [2, 1]})
    rows = [{"query": "cat", "text": "cat fish"}, {"query": "dog", "text": "dog"}]
    pairs = jsonl(tmp_path / "pairs.jsonl", rows)
    refused(["evaluate", model, "--pairs", pairs, "--output", tmp_path / "scores"], model, "not finite")
    texts = [f"w{number}" for number in range(3)]
    encoder = SimpleNamespace(name="flat", encode=lambda texts: np.ones((len(texts), 4), np.float32))
    score_encoder(RetrievalTest(texts, texts, [[0], [1], [2]]), encoder, Lexicon(texts))
    says("\n".join(log), "flat", "nearly equal", "1.0000")


def test_evaluate_pairs_of_a_missing_file_is_refused_and_an_encoder_named_twice_is_scored_once(tmp_path, refused):
    refused(["evaluate", "hashed-words:8", "--pairs", tmp_path / "none.jsonl"], "none.jsonl", "no such file")
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"query": f"w{number}", "text": f"w{number} x"} for number in range(3)])
    encoders = ["hashed-words:8", "hashed-words@0:8", "hashed-words:4"]
    assert main(["evaluate", *encoders, "--pairs", str(pairs), "--output", str(tmp_path / "scores")]) == 0
    written = json.loads((tmp_path / "scores" / "pairs.json").read_text())
    assert list(written["differences"]) == ["hashed-words:4"]


def test_differences_need_a_hundred_answers_for_an_interval():
    values, answers = np.random.default_rng(0).random((120, len(MEASURES))), np.arange(120)
    first, second = RetrievalScores("first", values, answers), RetrievalScores("second", values + 0.1, answers)
    assert all(comparison.measurable for comparison in differences(first, second).values())
    first, second = (RetrievalScores(name, values, answers % 99) for name in ("first", "second"))
    assert all(comparison.interval is None for comparison in differences(first, second).values())
    assert first.facts()["mrr"]["interval"] is None


def test_evaluate_pairs_writes_baselines_and_encoders(tmp_path, capsys):
    rng = np.random.default_rng(0)
    words = [f"word{n}" for n in range(400)]
    texts = [" ".join(rng.choice(words, 12)) for _ in range(120)]
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"query": " ".join(text.split()[:3]), "text": text} for text in texts])
    large, small = encoders = ["hashed-words:64", "hashed-words:8"]
    assert main(["evaluate", *encoders, "--pairs", str(pairs), "--output", str(tmp_path / "scores")]) == 0
    shown = capsys.readouterr().out
    says(shown, "120 queries with 120 different answers", "120 texts")
    says(shown, small, large)
    written = json.loads((tmp_path / "scores" / "pairs.json").read_text())
    names = [name for encoder in encoders for name in (encoder, f"{encoder} + IDF cosine")]
    assert list(written["scores"]) == ["BM25", "IDF cosine", *names]
    value = {name: scores["recall@1"]["value"] for name, scores in written["scores"].items()}
    assert value["BM25"] > 0.95
    assert value[large] > value[small]
    low, high = written["scores"][large]["recall@1"]["interval"]
    assert low < value[large] < high
    assert written["differences"][small]["recall@1"]["measurable"]


TEXTS = ["the cat sat on the mat", "a dog", "dogs and cats and dogs", "the the the", "nothing in common", "Cat!"]
QUERIES = ["the cat", "dogs, dogs", "unknown words_of", "mat and the mat"]


def test_measures_equal_a_plain_writing_and_scikit_learn():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(30, 40))
    relevant = [sorted(rng.choice(40, size=rng.integers(1, 14), replace=False).tolist()) for _ in range(30)]
    for values, texts, row in zip(scores, relevant, measures(scores, relevant), strict=True):
        found = dict(zip(MEASURES, row, strict=True))
        order = sorted(range(len(values)), key=lambda place: -values[place])
        for k in (1, 5, 10):
            assert found[f"recall@{k}"] == pytest.approx(len({*order[:k]} & {*texts}) / len(texts))
        first = next(place for place, text in enumerate(order, 1) if text in texts)
        assert found["mrr"] == pytest.approx(1 / first)
        truth = np.isin(np.arange(40), texts)[None].astype(float)
        assert found["ndcg@10"] == pytest.approx(ndcg_score(truth, values[None], k=10), abs=1e-12, rel=0)


def test_ties_are_the_mean_over_all_orders_of_equal_scores():
    scores = np.array([2.0, 1.0, 2.0, 1.0, 1.0, 0.0])
    orders = (list(order) for order in itertools.permutations(range(6)))
    places = np.stack([np.argsort(order) for order in orders if (np.diff(scores[order]) <= 0).all()])
    for relevant in ([0], [3], [0, 1], [1, 4], [0, 2, 5]):
        plain = measures(-places.astype(float), [relevant] * len(places)).mean(axis=0)
        assert measures(scores[None], [relevant])[0] == pytest.approx(plain, abs=1e-12)
    values = dict(zip(MEASURES, measures(np.zeros((1, 19)), [[3]])[0], strict=True))
    assert [values[f"recall@{k}"] for k in (1, 5, 10)] == pytest.approx([1 / 19, 5 / 19, 10 / 19])
    assert values["mrr"] == pytest.approx((1 / np.arange(1, 20)).mean())
    assert measures(np.zeros((1, 2)), [[0]])[0][0] == 0.5


WORDINGS = [
    (f"question {answer} wording {wording}", f"answer {answer}") for answer in range(100) for wording in range(3)
]


def test_halves_have_no_answer_in_common_and_stay_when_pairs_are_added(tmp_path):
    test = read_test(jsonl(tmp_path / "pairs.jsonl", [{"query": query, "text": text} for query, text in WORDINGS]))
    halves = {which: test.part(which, 0) for which in ("development", "test")}
    texts = {which: {text for numbers in half.relevant for text in numbers} for which, half in halves.items()}
    assert not texts["development"] & texts["test"]
    assert [len(set(half.answers.tolist())) for half in halves.values()] == [len(numbers) for numbers in texts.values()]
    assert sum(len(half.queries) for half in halves.values()) == 300
    assert min(map(len, texts.values())) > 30
    more = [{"query": f"more {number}", "text": f"text {number}"} for number in range(50)]
    more += [{"query": query, "text": text} for query, text in WORDINGS]
    longer = read_test(jsonl(tmp_path / "more.jsonl", more)).part("test", 0)
    assert set(halves["test"].queries) < set(longer.queries)
    thirds = [set(test.places(part, 0, train=True).tolist()) for part in ("development", "test", "train")]
    assert set.union(*thirds) == {*range(300)}
    assert sum(map(len, thirds)) == 300
    assert min(map(len, thirds)) > 50
    assert thirds[2] < {*test.places("development", 0).tolist()}, "the half that reports has no query that was learned"


def test_case_and_whitespace_make_no_other_answer_and_answers_that_a_query_joins_are_one(tmp_path):
    """A text or a query typed twice with a space or a capital more would be in both halves."""
    test = RetrievalTest(["a", "b", "c", "C "], ["one text", "One  text ", "two", "three"], [[0], [1], [2], [3]])
    assert test.answers.tolist() == [0, 0, 1, 1]
    assert RetrievalTest(["a", "b"], [], [[5], [7]]).answers.tolist() == [0, 1], "texts that are elsewhere"
    rows = [("a", "x"), ("b", "y"), ("c", "z"), ("d", "x"), ("e", "y"), ("d", "y")]  # d joins x and y
    test = read_test(jsonl(tmp_path / "pairs.jsonl", [{"query": query, "text": text} for query, text in rows]))
    assert test.queries == ["a", "b", "c", "d", "e"]
    assert test.answers.tolist() == [0, 0, 1, 0, 0]
    assert {len(test.places("test", seed)) for seed in range(20)} == {0, 1, 4, 5}


def test_wordings_of_an_answer_count_once():
    """The interval of three equal wordings is that of one; drawn one by one it would be narrower by the root of 3."""
    values, answers = np.random.default_rng(0).random((2, 120, len(MEASURES))), np.arange(120)
    alone = differences(*(RetrievalScores("a", side, answers) for side in values))
    three = [RetrievalScores("a", np.repeat(side, 3, axis=0), np.repeat(answers, 3)) for side in values]
    for name, comparison in differences(*three).items():
        assert comparison.interval == pytest.approx(alone[name].interval)
        assert (comparison.rows, comparison.changed) == (120, 120)
    facts = three[0].facts()["mrr"]
    low, high = facts["interval"]
    assert facts["value"] == pytest.approx(values[0, :, MEASURES.index("mrr")].mean())
    assert low < facts["value"] < high


def words_of(text):
    return re.findall(r"\w+", text.lower())


def test_bm25_and_idf_cosine_equal_plain_writings():
    counts, queries = ([Counter(words_of(text)) for text in texts] for texts in (TEXTS, QUERIES))
    having = {word: sum(word in other for other in counts) for count in counts for word in count}
    mean = sum(count.total() for count in counts) / len(counts)
    rarity = {word: math.log(1 + len(TEXTS) / number) for word, number in having.items()}

    def weights(count):
        return {word: (1 + math.log(n)) * rarity[word] for word, n in count.items() if word in rarity}

    lexicon = Lexicon(TEXTS)
    bm25, cosines = lexicon.bm25(QUERIES), lexicon.idf_cosine(QUERIES)
    for (row, query), (column, count) in itertools.product(enumerate(queries), enumerate(counts)):
        total, own, other = 0.0, weights(query), weights(count)
        for word in query.keys() & having.keys():
            share = math.log(1 + (len(TEXTS) - having[word] + 0.5) / (having[word] + 0.5))
            norm = 1.2 * (0.25 + 0.75 * count.total() / mean)
            total += share * count[word] * 2.2 / (count[word] + norm)
        assert bm25[row, column] == pytest.approx(total, abs=1e-5)
        norms = math.hypot(*own.values()) * math.hypot(*other.values())
        dot = sum(own[word] * other.get(word, 0) for word in own)
        assert cosines[row, column] == pytest.approx(dot / norms if norms else 0.0, abs=1e-6)
    for score in (Lexicon(["...", "!"]).bm25, Lexicon(["...", "!"]).idf_cosine):
        assert not score(["a", "!"]).any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_test(root / "nanobeir", *rows_of(0))
    write_test(root / "nanobeir", *rows_of(1), single=True, name="NanoSciFact")
    return root


@pytest.mark.parametrize("size", [None, 5])
def test_nanobeir_scores_are_those_of_sentence_transformers(folder, model, size):
    encoder, theirs = load_encoder(str(model), device="cpu"), SentenceTransformer(str(model), device="cpu")
    sizes = () if size is None else (size,)
    found = score_nanobeir(encoder, read_nanobeir(folder, ("NanoNQ", "NanoSciFact")), sizes, len)
    for seed, name in enumerate(("NanoNQ", "NanoSciFact")):
        documents, queries, judged = rows_of(seed)
        relevant = {query: {d for q, d in judged if q == query} for query in {query for query, _ in judged}}
        corpus = {key: text for key, text in documents.items() if text}
        evaluator = InformationRetrievalEvaluator(queries, corpus, relevant, truncate_dim=size, write_csv=False)
        scores, (*recalls, _, ndcg) = evaluator(theirs), found[size or encoder.size][name]
        assert ndcg == pytest.approx(scores["cosine_ndcg@10"], abs=1e-6)
        assert recalls == pytest.approx([scores[f"cosine_recall@{k}"] for k in (1, 5, 10)], abs=1e-6)


def test_nanobeir_by_name_writes_the_table_of_each_size(folder, model, tmp_path, capsys):
    words = ["--data", str(folder), "--tasks", "nanonq,NanoSciFact", "--sizes", "8", "--output", str(tmp_path)]
    assert main(["evaluate", str(model), *words]) == 0
    written = json.loads((tmp_path / "nanobeir.json").read_text())
    assert list(written["encoders"]) == [f"{model} [8]", str(model)]
    assert set(written["tests"]) == {"NanoNQ", "NanoSciFact"}
    scores = written["encoders"][str(model)]
    assert scores["mean_ndcg@10"] == pytest.approx(sum(row["ndcg@10"] for row in scores["tests"].values()) / 2)
    says(capsys.readouterr().out, "NanoNQ", "NanoSciFact", "mean")
    encoder = load_encoder(str(model), device="cpu")
    cut = CutEncoder(encoder, 7)  # the first numbers, with a fingerprint of their own
    assert (cut.encode(["a b"]) == encoder.encode(["a b"])[:, :7]).all()
    assert len({cut.fingerprint, CutEncoder(encoder, 8).fingerprint, encoder.fingerprint}) == 3


def test_nanobeir_has_thirteen_names_and_counts_judgements_of_missing_documents(tmp_path):
    assert split_names(["sts", "NanoBEIR", "MR"]) == (NAMES, ["sts", "MR"])
    assert len(NAMES) == 13
    assert split_names(["nanofiqa2018", "NanoFiQA2018"]) == (("NanoFiQA2018",), [])
    with pytest.raises(DataError, match=all_of("'NanoFIQA'", "`NanoFiQA2018`")):
        split_names(["NanoFIQA"])
    documents, queries, judged = rows_of(0)
    root = write_test(tmp_path / "nanobeir", documents, queries, [*judged, ("q0", "e"), ("q1", "gone"), ("q", "d1")])
    (found,) = read_nanobeir(tmp_path, ("NanoNQ",))
    (whole,) = read_nanobeir(write_test(root / "other" / "nanobeir", *rows_of(0)).parent, ("NanoNQ",))
    assert (found.left_out, found.test) == (3, whole.test)
    assert found.digest != whole.digest


@pytest.mark.parametrize(("part", "change", "facts"), [
    ("corpus", None, ("NanoNQ (corpus)", "hf download zeta-alpha-ai/NAME")),
    ("corpus", {"_id": ["a"], "title": ["x"]}, ("corpus", "no column text")),
    ("queries", {"_id": [1, 2], "text": ["x", "y"]}, ("queries", "int64")),
    ("queries", {"_id": ["q0", None], "text": ["x", "y"]}, ("queries", "rows without _id")),
    ("qrels", {"query-id": ["q"], "corpus-id": ["d"]}, ("none of its 1 judgements",)),
    ("qrels", b"PAR1 and no more", ("qrels", "not Parquet")),
])  # fmt: skip
def test_nanobeir_of_poor_files_names_the_file(tmp_path, part, change, facts):
    root = write_test(tmp_path / "nanobeir", *rows_of(0))
    (path,) = (root / "NanoNQ" / part).iterdir()
    path.unlink()
    if isinstance(change, bytes):
        path.write_bytes(change)
    elif change:
        pq.write_table(pa.table(change), path)
    with pytest.raises(DataError, match=all_of(facts)):
        read_nanobeir(tmp_path, ("NanoNQ",))


def test_sizes_of_the_command_that_are_none_are_refused(folder, model, tmp_path, refused):
    for sizes, facts in (
        ("32", ("--sizes 32", "32 numbers", "smaller")), ("0", ("'0'", "from 1")),
        ("8,2.5,x", ("'2.5', 'x'", "whole numbers")), ("8,8", ("twice",)),
    ):  # fmt: skip
        words = ["--data", str(folder), "--tasks", "NanoNQ", "--output", str(tmp_path), "--sizes", sizes]
        refused(["evaluate", model, *words], *facts)
