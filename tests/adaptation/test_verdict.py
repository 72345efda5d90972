"""Passages, headings, questions and their measures, choice and verdict, what the folder of an adaptation remembers."""

import json

import numpy as np
import pytest
from messages import all_of, says
from transformers import AutoTokenizer

from declutr.adaptation.config import LENGTHS, STATE, AdaptConfig, Lengths, opened
from declutr.adaptation.paragraphs import Paragraphs, paragraph_pairs
from declutr.adaptation.passages import Passages, make_passages
from declutr.adaptation.scores import DISTANT, HEADINGS, PAIRS, SENTENCES, choose, compared, judge
from declutr.common.bootstrap import share
from declutr.common.errors import UsageError
from declutr.pipeline.tokenizer.tokenization import train_tokenizer

NAMES, DOCUMENTS = [f"candidate {number}" for number in range(6)], 250


def test_choose_takes_the_highest_score_and_the_first_only_if_it_is_measurably_better():
    base = np.append(np.random.default_rng(0).beta(2, 2, DOCUMENTS), np.nan)  # the last document has no distant pair
    noise = np.random.default_rng(1).normal(0, 0.4, len(base))
    noise += 0.02 - noise[:-1].mean()

    def chosen(**shifts):
        rows = {name: base + shifts.get(name[-1], 0) for name in NAMES}
        tables = {name: {DISTANT: row, PAIRS: np.stack([row, np.ones(len(row))], axis=1)} for name, row in rows.items()}
        names = {choose(NAMES, tables, measure, 0) for measure in (DISTANT, PAIRS)}
        assert choose(NAMES[:1], tables, DISTANT, 0) == NAMES[0]
        return names

    assert chosen() == {NAMES[1]}, "of equal ones the cheapest"
    assert chosen(**{"3": 0.001}) == {NAMES[3]}
    assert chosen(**{"0": noise, "3": 0.001}) == {NAMES[3]}, "higher, but not measurably"
    assert chosen(**{"0": 0.02, "3": 0.001}) == {NAMES[0]}
    rows = zip(NAMES, (0.0, 0.0, 0.2, 0.05), (0.5, 0.5, 0.4, 0.4), strict=False)
    both = {name: {DISTANT: base + far, SENTENCES: np.array([[asked, 1]])} for name, far, asked in rows}
    assert choose(NAMES[:4], both, SENTENCES, 0) == NAMES[2]
    short = {name: values | {DISTANT: np.zeros(0)} for name, values in both.items()}  # no document has passages
    assert choose(NAMES[:4], short, SENTENCES, 0) == NAMES[1]


def test_judge_says_how_many_documents_a_point_needs():
    rng = np.random.default_rng(1)
    base = rng.beta(2, 2, 400)
    verdict = judge({DISTANT: base}, {DISTANT: base + rng.normal(0, 0.2, 400)}, DISTANT, 0)
    assert verdict.outcome == "no measurable difference"
    low, high = verdict.comparison.interval
    assert verdict.rows_needed == round(400 * ((high - low) / 0.02) ** 2)
    says(verdict.sentence("documents"), f"{verdict.rows_needed:,} test documents")
    near = judge({DISTANT: base}, {DISTANT: base + rng.normal(0, 0.01, 400)}, DISTANT, 0)
    assert near.rows_needed == 100  # an interval needs as many, however little the rows differ


@pytest.mark.parametrize(
    ("documents", "shift", "outcome", "words"),
    [
        (120, 0.1, "better", ("+10.0 points", "95% interval")),
        (120, -0.1, "worse", ("-10.0 points", "95% interval")),
        (99, 0.1, "too few documents to tell", ("99 test documents", "100")),
    ],
)
def test_judge_of_a_clear_difference_names_its_direction_if_there_are_a_hundred(documents, shift, outcome, words):
    base = np.random.default_rng(0).beta(2, 2, documents)
    verdict = judge({DISTANT: base}, {DISTANT: base + shift}, DISTANT, 0)
    assert verdict.outcome == outcome
    assert documents >= 100 or verdict.rows_needed is None
    says(verdict.sentence("documents"), *words)


def test_judge_of_five_queries_that_changed_finds_no_difference():
    start = np.stack([np.zeros(200), np.ones(200)], axis=1)  # recalls and queries of answers
    after = start.copy()
    after[:5, 0] = 1
    verdict = judge({PAIRS: start}, {PAIRS: after}, PAIRS, 0)
    assert verdict.outcome == "no measurable difference"
    says(verdict.sentence("answers"), "answers that differ: 5", "needs 6")
    for few in (verdict, judge({PAIRS: start}, {PAIRS: start}, PAIRS, 0)):  # an interval of (almost) no width
        assert few.rows_needed is None
        assert "would need" not in few.sentence("answers")


WORDS = [f"word{number}" for number in range(50)]
REST = " ".join(f"Sentence {number} follows with more words." for number in range(6))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([" ".join(WORDS), REST] * 20, 400).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def text(words, seed):
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def drawn(counts, seed=0):
    """Passages of documents with these numbers of windows, and random scores."""
    rng, owners = np.random.default_rng(seed), np.repeat(np.arange(len(counts)), counts)
    starts = np.concatenate([np.arange(count) * 80 for count in counts])
    targets = rng.integers(0, len(counts), 12)
    passages = Passages(["a"] * len(owners), [], owners, starts, starts + 62, ["q"] * 12, targets, len(counts))
    return passages, rng.normal(size=(len(owners), len(owners))).round(1), rng.normal(size=(12, len(owners))).round(1)


def test_distant_equals_a_plain_writing():
    counts = [8, 3, 2, 5, 8, 1]
    passages, scores, _ = drawn(counts)
    first, expected = np.cumsum([0, *counts]), []
    for document, count in enumerate(counts):
        hits = []
        for number in range(8):
            gallery = [int(first[d]) + number * c // 8 for d, c in enumerate(counts)]
            for query in range(int(first[document]), int(first[document]) + count):
                own = gallery[document]
                if abs(passages.starts[query] - passages.starts[own]) >= 62 + 96:
                    hits.append(all(scores[query, own] > scores[query, other] for other in gallery if other != own))
        expected.append(np.mean(hits) if hits else np.nan)
    shares = passages.distant(scores)
    assert np.array_equal(shares, expected, equal_nan=True)
    assert np.isnan(shares).tolist() == [False, False, True, False, False, True]
    assert 0 < np.nanmean(shares) < 1
    assert passages.scorable.tolist() == (~np.isnan(shares)).tolist()
    assert not np.nan_to_num(passages.distant(np.zeros_like(scores))).any(), "ties are no hits"


@pytest.mark.parametrize(("windows", "scorable"), [(2, False), (3, False), (4, True), (9, True)])
def test_make_passages_of_fewer_than_256_tokens_has_no_distant_pair(tokenizer, windows, scorable):
    encoded = tokenizer.backend_tokenizer.encode(text(1500, 0), add_special_tokens=False)
    passages = make_passages([text(1500, 0)[: encoded.offsets[64 * windows - 1][1]]], tokenizer)
    assert passages.scorable.tolist() == [scorable]
    assert (windows * 64 >= LENGTHS.long) is scorable
    assert np.isnan(passages.distant(np.eye(len(passages.texts), dtype=np.float32))[0]) == (not scorable)


def test_own_passages_are_cut_to_what_is_read_and_apart_if_96_tokens_are_between_them(tokenizer, caplog):
    own = [text(words, seed) for seed, words in enumerate([20, 150, 50, 5, 90])]
    tokens = [len(tokenizer(passage, add_special_tokens=False)["input_ids"]) for passage in own]
    body, rows = "\n\n".join(own), np.arange(5)
    passages = make_passages([body], tokenizer, lengths=Lengths(100), own={body: own})
    assert passages.texts == own
    assert [len(ids) - 2 for ids in passages.ids] == [min(count, 100) for count in tokens]
    assert (passages.ends - passages.starts).tolist() == tokens
    assert not passages.queries
    between = [[sum(tokens[min(a, b) + 1 : max(a, b)]) for b in rows] for a in rows]
    assert np.array_equal(passages.apart(rows[:, None], rows), np.array(between) >= 96)
    longer = sum(count > 100 for count in tokens)
    assert f"{longer} of 5 passages" in caplog.text
    assert longer


def test_longer_passages_are_as_long_and_far_as_they_say(tokenizer):
    lengths = Lengths(126)
    passages = make_passages([text(900, 0)], tokenizer, lengths=lengths)
    assert {len(ids) - 2 for ids in passages.ids} == {126}
    assert set(np.diff(passages.starts)) <= {128, 256}
    assert (lengths.window, lengths.far, lengths.long) == (128, 222, 384)
    assert not np.isnan(passages.distant(1 - np.eye(len(passages.ids), dtype=np.float32))).any()


def test_passages_of_no_document_and_headings_of_none_have_no_value(tokenizer):
    none = make_passages([], tokenizer)
    assert (none.scorable.tolist(), none.distant(np.zeros((0, 0))).tolist()) == ([], [])
    plain = make_passages([text(300, 0)], tokenizer)
    assert plain.queries == []
    assert np.isnan(share(plain.headings(np.zeros((0, len(plain.texts))))))


def test_headings_equal_a_plain_writing():
    passages, _, scores = drawn([8, 3, 2, 5])
    expected = np.zeros((4, 2))
    for query, target in enumerate(passages.targets):
        best = [scores[query, passages.owners == document].max() for document in range(4)]
        expected[target] += [all(best[target] > other for d, other in enumerate(best) if d != target), 1]
    counts = passages.headings(scores)
    assert np.array_equal(counts, expected)
    assert share(counts) == pytest.approx(expected[:, 0].sum() / 12)
    assert not passages.headings(np.zeros_like(scores))[:, 0].any(), "ties are no hits"


def test_compared_leaves_out_documents_without_headings():
    """Most documents have none: a draw of documents without any would have no score."""
    start = np.zeros((400, 2))
    start[:110, 1] = 2
    better = start.copy()
    better[:110:2, 0] = 1
    comparison = compared({HEADINGS: start}, {HEADINGS: better}, 0)[HEADINGS]
    assert (comparison.rows, comparison.difference) == (110, 0.25)
    assert 0 < comparison.interval[0] < 0.25 < comparison.interval[1] < 0.5


def test_make_passages_takes_headings_out_and_leaves_common_ones_out(tokenizer):
    bodies = [text(300, 0), text(200, 1)]
    first = f"A title of its own\n\n# Introduction here\n{bodies[0]}\n## Results of word1\n"
    passages = make_passages([first, f"# Introduction here\n{bodies[1]}", "# Another one\ntoo short"], tokenizer)
    assert passages.num_documents == 2
    assert passages.queries == ["A title of its own", "Results of word1"]
    assert passages.targets.tolist() == [0, 0]
    assert all(not any(heading in passage for heading in passages.queries) for passage in passages.texts)
    assert np.bincount(passages.owners).max() <= 8
    columns = passages.ids, passages.texts, passages.owners, passages.starts
    for ids, passage, owner, start in zip(*columns, strict=True):
        every = tokenizer(bodies[owner], add_special_tokens=False)["input_ids"]
        assert ids[1:-1] == every[start : start + 62]
        assert [ids[0], ids[-1]] == [tokenizer.cls_token_id or tokenizer.bos_token_id, tokenizer.eos_token_id]
        assert passage.strip() in bodies[owner]


def test_long_first_lines_without_spaces_stay_and_short_ones_are_headings(tokenizer):
    long = "日本語の文章は空白で区切られない。" * 4
    passages = make_passages([f"{long}\n{text(300, 0)}", f"# 見出しの例\n{text(300, 1)}"], tokenizer)
    assert passages.queries == ["見出しの例"]
    assert long[:10] in passages.texts[0]


def sentence(name):
    return f"The paragraph about {name} begins here."


@pytest.mark.parametrize(
    ("block", "query"),
    [
        (f"{sentence('cats')} {REST}", sentence("cats")),
        (f"{sentence('cats')}\n{REST}", sentence("cats")),
        (f"# A heading of several words\n\n{sentence('cats')} {REST}", sentence("cats")),
        (f"- A list of four words. {REST}", None),
        (f"and the end of a sentence. {REST}", None),
        (f"Too short. {REST}", None),
        (f"{sentence('cats')} Short rest.", None),
        (f"{' '.join(['Word'] * 41)}. {REST}", None),
        ("", None),
    ],
)
def test_first_sentences_of_prose_search_the_rest_of_their_paragraph(tokenizer, block, query):
    pairs = paragraph_pairs({"test": [block]}, tokenizer)["test"]
    assert pairs.queries == ([query] if query else [])
    for answer in pairs.answers:
        assert REST.startswith(answer)
        assert len(tokenizer(answer, add_special_tokens=False)["input_ids"]) <= 62


def test_what_two_documents_share_searches_nothing_and_a_document_gives_at_most_four(tokenizer):
    shared = f"{sentence('the licence')} {REST}"
    rest = [f"{REST} Part {number} of {name} ends." for name in "ab" for number in range(9)]
    paragraphs = [f"{sentence(f'number {number}')} {text}" for number, text in enumerate(rest)]
    documents = ["\n\n".join([shared, *paragraphs[:9]]), "\n\n".join([shared, *paragraphs[9:12]]), "nothing"]
    pairs = paragraph_pairs({"test": documents}, tokenizer)["test"]
    assert pairs.owners.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert sentence("the licence") not in pairs.queries
    assert pairs.queries[0] == sentence("number 0")
    assert pairs.queries[3] == sentence("number 8"), "spread over the document"


@pytest.mark.parametrize(("asking", "question"), [(100, True), (99, False)])
def test_questions_search_if_a_hundred_documents_have_one(tokenizer, asking, question):
    documents = [f"{sentence(f'thing {number}')} {REST} Of thing {number}." for number in range(120)]
    documents[:asking] = [f"# What is thing {n}?\n\n{document}" for n, document in enumerate(documents[:asking])]
    more = [f"# What is other {number}?\n\n{REST} Of other {number}." for number in range(100)]
    pairs = paragraph_pairs({"development": more, "test": documents}, tokenizer)
    assert len(pairs["test"].queries) == (asking if question else 120)
    assert all(query.endswith("?") == question for part in pairs.values() for query in part.queries)


def test_recall_counts_by_document_and_a_tie_is_no_hit():
    paragraphs = Paragraphs(["a", "b", "c"], ["x", "y", "z"], np.array([0, 0, 2]), 3)
    scores = np.array([[3, 1, 2], [1, 1, 0], [0, 1, 2]], np.float32)
    assert paragraphs.recall(scores).tolist() == [[1, 2], [0, 0], [1, 1]]


CONFIG = AdaptConfig(encoder="models/x", corpus=["texts"], minutes=10)


def test_opened_after_a_stop_or_a_kill_keeps_time_steps_and_looks(tmp_path):
    with opened(CONFIG, tmp_path) as state:
        state.write(steps=77)
        state.look("first")
        killed = (tmp_path / STATE).read_bytes()
    for left in ((tmp_path / STATE).read_bytes(), killed):
        (tmp_path / STATE).write_text(json.dumps(json.loads(left) | {"seconds": 240.0}))
        with opened(CONFIG.model_copy(update={"minutes": 5.0}), tmp_path) as state:
            assert state.steps == 77
            assert 59 < state.seconds_left <= 60
            assert [state.look(what) for what in ("first", "second", "first")] == [1, 2, 2]


def test_more_minutes_are_new_ones_if_those_before_sufficed_for_no_training(tmp_path):
    with opened(CONFIG, tmp_path) as state:
        state.write(seconds=600.0)
    for minutes, left in ((10, 0), (12, 720)):
        with opened(CONFIG.model_copy(update={"minutes": minutes}), tmp_path) as state:
            assert left - 1 < state.seconds_left <= left


def test_opened_with_a_changed_or_another_encoder_or_a_damaged_file_is_refused(tmp_path):
    for _ in range(2):
        with opened(CONFIG, tmp_path) as state:
            state.check("first")
            state.write(start="first")
    with opened(CONFIG, tmp_path) as state, pytest.raises(UsageError, match=all_of("encoder has changed", "folder")):
        state.check("second")
    other = CONFIG.model_copy(update={"encoder": "models/y"})
    with pytest.raises(UsageError, match=all_of("another encoder", "another folder")), opened(other, tmp_path):
        pass
    (tmp_path / STATE).write_text("{")
    with pytest.raises(UsageError, match=all_of("damaged", "delete", "candidates")), opened(CONFIG, tmp_path):
        pass
