"""`evaluate --pairs`: files of pairs, the table of encoders and baselines, and measures against plain writings."""

import csv
import itertools
import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from folders import jsonl, static_folder
from messages import all_of, says
from sklearn.metrics import ndcg_score

from declutr.cli.main import main
from declutr.common.errors import DataError
from declutr.evaluation.retrieval.compare import MEASURES, RetrievalScores, differences, measures, score_encoder
from declutr.evaluation.retrieval.lexicon import Lexicon
from declutr.evaluation.retrieval.pairs import RetrievalTest, read_test

READ = {
    "a query twice": ([("a", "x"), ("b", "y"), ("a", "y")], None, (["a", "b"], ["x", "y"], [[0, 1], [1]])),
    "documents that no pair names": (
        [("a", 7), ("c", 8)],
        [(6, "text 6"), (7, "text 7"), (8, "text 8")],
        (["a", "c"], ["text 6", "text 7", "text 8"], [[1], [2]]),
    ),
    "several texts of an id": (
        [("a", 1), ("b", 2)],
        [(1, "cat"), (2, "fish"), (1, "bird"), (1, "cat")],
        (["a", "b"], ["cat", "fish", "bird"], [[0, 2], [1]]),
    ),
    # Two of the same text would tie: no query of them could find its own first.
    "ids with the same text": (
        [("a", 1), ("b", 2), ("c", 3)],
        [(1, "cat"), (2, "fish"), (3, "cat")],
        (["a", "b", "c"], ["cat", "fish"], [[0], [1], [0]]),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_read_test_joins_queries_and_searches_every_text_once(tmp_path, name):
    pairs, documents, expected = READ[name]
    target = "text" if documents is None else "id"
    path = jsonl(tmp_path / "pairs.jsonl", [{"query": query, target: value} for query, value in pairs])
    rows = documents and jsonl(tmp_path / "documents.jsonl", [{"id": key, "text": text} for key, text in documents])
    test = read_test(path, rows)
    assert (test.queries, test.texts, test.relevant) == expected


def test_read_test_of_csv_keeps_commas_in_quotes(tmp_path):
    (tmp_path / "pairs.csv").write_text('\ufeffquery,text,more\n"a, ""b""",x,\nc,y,\n', encoding="utf-8")
    assert read_test(tmp_path / "pairs.csv").queries == ['a, "b"', "c"]


POOR = [
    ("pairs.jsonl", b'{"query": "a", "txt": "b"}', ("text", "query, txt")),
    ("pairs.jsonl", b'{"query": "a", "text": ""}', ("pairs.jsonl", "line 1", "`text`", "''")),
    ("pairs.jsonl", b'{"query": "a", "text": "b"}\n{"query": null, "text": "b"}', ("line 2", "`query`", "'None'")),
    ("pairs.jsonl", b"", "no pairs"),
    ("pairs.jsonl", b'["query", "text"]', ("line 1", "list", "object")),
    ("pairs.jsonl", b'{"query": "a", "text": "b"}', "one text"),
    ("pairs.jsonl", b'{"query": "a", "text": "cat \\ud83d"}', ("line 1", "`text`", "half of a character")),
    ("a.jsonl", b"{", "line 1: is not JSON"),
    ("a.jsonl", b"\xff\n", "UTF-8"),
    ("a.csv", b"\xff,\n1,2\n", "UTF-8"),
    ("a.csv", b'query,text\n1,"a "b" c"\n', ("CSV", '"')),
    ("a.tsv", b'query\ttext\n1\t"a\n2\tb\n3\tc"\n', ("line 4", '""')),
    ("pairs.csv", b"query,text\na,b,\nwhat,it is this, and that\n", ("line 3", "quotes", "','")),
]


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


def test_read_test_of_csv_takes_texts_beyond_the_limit_of_the_csv_module(tmp_path):
    (tmp_path / "pairs.csv").write_text(f"query,text\na,{'x' * 200_000}\nb,y\n")
    limit = csv.field_size_limit(131_072)
    try:
        assert [len(text) for text in read_test(tmp_path / "pairs.csv").texts] == [200_000, 1]
    finally:
        csv.field_size_limit(limit)


def test_measures_of_embeddings_that_are_not_finite_are_refused(tmp_path, capsys):
    model = static_folder(tmp_path / "words", {"cat": [math.nan, 1], "dog": [0.5, 1], "fish": [2, 1]})
    rows = [{"query": "cat", "text": "cat fish"}, {"query": "dog", "text": "dog"}]
    pairs = jsonl(tmp_path / "pairs.jsonl", rows)
    given = ["--pairs", str(pairs), "--output", str(tmp_path / "scores")]
    assert main(["evaluate", str(model), *given]) == 1
    says(capsys.readouterr().err, model, "not finite")


def test_evaluate_pairs_of_an_encoder_named_twice_scores_it_once(tmp_path):
    rows = [{"query": f"w{number}", "text": f"w{number} x"} for number in range(3)]
    pairs = jsonl(tmp_path / "pairs.jsonl", rows)
    given = ["hashed-words:8", "hashed-words@0:8", "hashed-words:4", "--pairs", str(pairs)]
    assert main(["evaluate", *given, "--output", str(tmp_path / "scores")]) == 0
    written = json.loads((tmp_path / "scores" / "pairs.json").read_text())
    assert list(written["differences"]) == ["hashed-words:4"]


def test_differences_need_a_hundred_answers_for_an_interval():
    rng = np.random.default_rng(0)
    values, answers = rng.random((120, len(MEASURES))), np.arange(120)
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
    encoders = ["hashed-words:64", "hashed-words:8"]
    assert main(["evaluate", *encoders, "--pairs", str(pairs), "--output", str(tmp_path / "scores")]) == 0
    told = capsys.readouterr().out
    says(told, "120 queries with 120 different answers", "120 texts")
    says(told, "hashed-words:8", "hashed-words:64")
    written = json.loads((tmp_path / "scores" / "pairs.json").read_text())
    assert list(written["scores"]) == [
        "BM25", "IDF cosine", encoders[0], f"{encoders[0]} + IDF cosine", encoders[1], f"{encoders[1]} + IDF cosine"
    ]  # fmt: skip
    value = {name: each["recall@1"]["value"] for name, each in written["scores"].items()}
    assert value["BM25"] > 0.95
    assert value[encoders[0]] > value[encoders[1]]
    low, high = written["scores"][encoders[0]]["recall@1"]["interval"]
    assert low < value[encoders[0]] < high
    assert written["differences"][encoders[1]]["recall@1"]["measurable"]


def test_evaluate_pairs_of_a_missing_file_is_refused_without_torch(tmp_path, capsys):
    assert main(["evaluate", "hashed-words:8", "--pairs", str(tmp_path / "none.jsonl")]) == 1
    says(capsys.readouterr().err, "none.jsonl", "no such file")


TEXTS = ["the cat sat on the mat", "a dog", "dogs and cats and dogs", "the the the", "nothing in common", "Cat!"]
QUERIES = ["the cat", "dogs, dogs", "unknown words_of", "mat and the mat"]


def drawn(queries=30, texts=40, ties=False):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(queries, texts))
    relevant = [sorted(rng.choice(texts, size=rng.integers(1, 14), replace=False).tolist()) for _ in range(queries)]
    return (scores.round(1) if ties else scores), relevant


def test_ndcg_equals_scikit_learn():
    scores, relevant = drawn()
    truth = np.zeros_like(scores)
    for row, wanted in enumerate(relevant):
        truth[row, wanted] = 1
    found = measures(scores, relevant)[:, MEASURES.index("ndcg@10")]
    expected = [ndcg_score(truth[row : row + 1], scores[row : row + 1], k=10) for row in range(len(scores))]
    assert np.abs(found - expected).max() < 1e-12


def test_measures_equal_a_plain_writing():
    scores, relevant = drawn()
    for values, wanted, found in zip(scores, relevant, measures(scores, relevant), strict=True):
        order = sorted(range(len(values)), key=lambda place: -values[place])
        for k in (1, 5, 10):
            assert found[MEASURES.index(f"recall@{k}")] == pytest.approx(len({*order[:k]} & {*wanted}) / len(wanted))
        first = next(place for place, text in enumerate(order, 1) if text in wanted)
        assert found[MEASURES.index("mrr")] == pytest.approx(1 / first)


@pytest.mark.parametrize("relevant", [[0], [3], [0, 1], [1, 4], [0, 2, 5]])
def test_ties_are_the_mean_over_all_orders_of_equal_scores(relevant):
    scores = np.array([2.0, 1.0, 2.0, 1.0, 1.0, 0.0])
    orders = (list(order) for order in itertools.permutations(range(6)))
    places = np.stack([np.argsort(order) for order in orders if (np.diff(scores[order]) <= 0).all()])
    plain = measures(-places.astype(float), [relevant] * len(places)).mean(axis=0)
    assert measures(scores[None], [relevant])[0] == pytest.approx(plain, abs=1e-12)


def test_an_encoder_that_tells_nothing_apart_scores_as_chance():
    values = dict(zip(MEASURES, measures(np.zeros((1, 19)), [[3]])[0], strict=True))
    assert [values[f"recall@{k}"] for k in (1, 5, 10)] == pytest.approx([1 / 19, 5 / 19, 10 / 19])
    assert values["mrr"] == pytest.approx((1 / np.arange(1, 20)).mean())
    assert measures(np.zeros((1, 2)), [[0]])[0][0] == 0.5


def test_collapsed_embeddings_are_named(log):
    texts = [f"w{number}" for number in range(3)]
    encoder = SimpleNamespace(name="flat", encode=lambda texts: np.ones((len(texts), 4), np.float32))
    score_encoder(RetrievalTest(texts, texts, [[0], [1], [2]]), encoder, Lexicon(texts))
    says("\n".join(log), "flat", "nearly equal", "1.0000")


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


def test_case_and_whitespace_make_no_other_answer():
    """A text or a query typed twice with a space or a capital more would be in both halves."""
    test = RetrievalTest(["a", "b", "c", "C "], ["one text", "One  text ", "two", "three"], [[0], [1], [2], [3]])
    assert test.answers.tolist() == [0, 0, 1, 1]
    assert RetrievalTest(["a", "b"], [], [[5], [7]]).answers.tolist() == [0, 1], "texts that are elsewhere"


def test_answers_that_a_query_joins_are_one(tmp_path):
    rows = [("a", "x"), ("b", "y"), ("c", "z"), ("d", "x"), ("e", "y"), ("d", "y")]  # d joins x and y
    test = read_test(jsonl(tmp_path / "pairs.jsonl", [{"query": query, "text": text} for query, text in rows]))
    assert test.queries == ["a", "b", "c", "d", "e"]
    assert test.answers.tolist() == [0, 0, 1, 0, 0]
    assert {len(test.places("test", seed)) for seed in range(20)} == {0, 1, 4, 5}


def test_wordings_of_an_answer_count_once():
    """The interval of three equal wordings is that of one; drawn one by one it would be narrower by the root of 3."""
    rng = np.random.default_rng(0)
    before, after = rng.random((2, 120, len(MEASURES)))
    answers = np.arange(120)
    alone = differences(RetrievalScores("a", before, answers), RetrievalScores("b", after, answers))
    three = [RetrievalScores(name, np.repeat(values, 3, axis=0), np.repeat(answers, 3)) for name, values in
             (("a", before), ("b", after))]  # fmt: skip
    for name, comparison in differences(*three).items():
        assert comparison.interval == pytest.approx(alone[name].interval)
        assert (comparison.rows, comparison.changed) == (120, 120)
    facts = three[0].facts()["mrr"]
    low, high = facts["interval"]
    assert facts["value"] == pytest.approx(before[:, MEASURES.index("mrr")].mean())
    assert low < facts["value"] < high


def words_of(text):
    return re.findall(r"\w+", text.lower())


def test_bm25_equals_a_plain_writing():
    counts = [Counter(words_of(text)) for text in TEXTS]
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / len(lengths)
    found = Lexicon(TEXTS).bm25(QUERIES)
    for row, query in enumerate(QUERIES):
        for column, count in enumerate(counts):
            total = 0.0
            for word in set(words_of(query)):
                having = sum(word in each for each in counts)
                rarity = math.log(1 + (len(TEXTS) - having + 0.5) / (having + 0.5))
                norm = 1.2 * (0.25 + 0.75 * lengths[column] / mean)
                total += rarity * count[word] * 2.2 / (count[word] + norm)
            assert found[row, column] == pytest.approx(total, abs=1e-5)


def test_idf_cosine_equals_a_plain_writing():
    counts = [Counter(words_of(text)) for text in TEXTS]
    rarity = {w: math.log(1 + len(TEXTS) / sum(w in each for each in counts)) for count in counts for w in count}

    def vector(count):
        return {w: (1 + math.log(n)) * rarity[w] for w, n in count.items() if w in rarity}

    found = Lexicon(TEXTS).idf_cosine(QUERIES)
    for row, query in enumerate(QUERIES):
        own = vector(Counter(words_of(query)))
        for column, count in enumerate(counts):
            other = vector(count)
            dot = sum(own[w] * other.get(w, 0) for w in own)
            norms = math.hypot(*own.values()) * math.hypot(*other.values())
            assert found[row, column] == pytest.approx(dot / norms if norms else 0.0, abs=1e-6)


def test_lexicon_of_texts_without_words_scores_nothing():
    assert not Lexicon(["...", "!"]).bm25(["a", "!"]).any()
    assert not Lexicon(["...", "!"]).idf_cosine(["a", "!"]).any()
