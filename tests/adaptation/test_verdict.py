"""Passages, headings, questions and their measures, choice and verdict, what the folder of an adaptation remembers."""

import json

import numpy as np
import pytest
from messages import all_of, says
from transformers import AutoTokenizer

from declutr.adaptation.config import LENGTHS, STATE, AdaptConfig, Lengths, opened
from declutr.adaptation.paragraphs import Paragraphs, paragraph_pairs
from declutr.adaptation.passages import Passages, make_passages
from declutr.adaptation.scores import DISTANT, HEADINGS, PAIRS, choose, compared, judge
from declutr.common.bootstrap import share
from declutr.common.errors import UsageError
from declutr.pipeline.tokenizer.tokenization import train_tokenizer

NAMES = [f"candidate {number}" for number in range(6)]
DOCUMENTS = 250


def test_choose_takes_the_highest_score_and_of_equal_ones_the_cheapest():
    base = np.append(np.random.default_rng(0).beta(2, 2, DOCUMENTS), np.nan)  # the last document has no distant pair
    table = {name: {DISTANT: base, PAIRS: np.stack([base, np.ones(len(base))], axis=1)} for name in NAMES}
    assert choose(NAMES, table, DISTANT) == choose(NAMES, table, PAIRS) == NAMES[0]
    table[NAMES[3]] = {DISTANT: base + 0.001, PAIRS: table[NAMES[0]][PAIRS] + [0.001, 0]}
    assert choose(NAMES, table, DISTANT) == choose(NAMES, table, PAIRS) == NAMES[3]
    assert choose(NAMES[:3], table, DISTANT) == NAMES[0]


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


@pytest.mark.parametrize(("shift", "told"), [(0.1, "better"), (-0.1, "worse")])
def test_judge_of_a_clear_difference_names_its_direction(shift, told):
    base = np.random.default_rng(0).beta(2, 2, 120)
    verdict = judge({DISTANT: base}, {DISTANT: base + shift}, DISTANT, 0)
    assert verdict.outcome == told
    says(verdict.sentence("documents"), f"{100 * shift:+.1f} points", "95% interval")


def test_judge_of_fewer_than_a_hundred_documents_tells_nothing():
    base = np.random.default_rng(0).beta(2, 2, 99)
    verdict = judge({DISTANT: base}, {DISTANT: base + 0.1}, DISTANT, 0)
    assert verdict.outcome == "too few documents to tell"
    assert verdict.rows_needed is None
    says(verdict.sentence("documents"), "99 test documents", "100")


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
    rng = np.random.default_rng(seed)
    owners = np.repeat(np.arange(len(counts)), counts)
    starts = np.concatenate([np.arange(count) * 80 for count in counts])
    targets = rng.integers(0, len(counts), 12)
    passages = Passages(["a"] * len(owners), [], owners, starts, starts + 62, ["q"] * 12, targets, len(counts))
    return passages, rng.normal(size=(len(owners), len(owners))).round(1), rng.normal(size=(12, len(owners))).round(1)


def test_distant_equals_a_plain_writing():
    counts = [8, 3, 2, 5, 8, 1]
    passages, scores, _ = drawn(counts)
    first = np.cumsum([0, *counts])
    expected = []
    for document, count in enumerate(counts):
        hits = []
        for number in range(8):
            gallery = [int(first[d]) + number * c // 8 for d, c in enumerate(counts)]
            for query in range(int(first[document]), int(first[document]) + count):
                own = gallery[document]
                if abs(passages.starts[query] - passages.starts[own]) >= 62 + 96:
                    hits.append(all(scores[query, own] > scores[query, other] for other in gallery if other != own))
        expected.append(np.mean(hits) if hits else np.nan)
    found = passages.distant(scores)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.isnan(found).tolist() == [False, False, True, False, False, True]
    assert 0 < np.nanmean(found) < 1
    assert passages.scorable.tolist() == (~np.isnan(found)).tolist()


@pytest.mark.parametrize(("windows", "scorable"), [(2, False), (3, False), (4, True), (9, True)])
def test_make_passages_of_fewer_than_256_tokens_has_no_distant_pair(tokenizer, windows, scorable):
    engine = tokenizer.backend_tokenizer
    encoded = engine.encode(text(1500, 0), add_special_tokens=False)
    body = text(1500, 0)[: encoded.offsets[64 * windows - 1][1]]
    made = make_passages([body], tokenizer)
    assert made.scorable.tolist() == [scorable]
    assert (windows * 64 >= LENGTHS.long) is scorable
    scores = np.eye(len(made.texts), dtype=np.float32)
    assert np.isnan(made.distant(scores)[0]) == (not scorable)


def test_own_passages_are_cut_to_what_is_read_and_apart_if_96_tokens_are_between_them(tokenizer, caplog):
    words = text(400, 0).split()
    sizes = [20, 150, 50, 5, 90]
    own = [" ".join(words[sum(sizes[:number]) : sum(sizes[: number + 1])]) for number in range(len(sizes))]
    tokens = [len(tokenizer(passage, add_special_tokens=False)["input_ids"]) for passage in own]
    body = "\n\n".join(own)
    made = make_passages([body], tokenizer, lengths=Lengths(100), own={body: own})
    assert made.texts == own
    assert [len(ids) - 2 for ids in made.ids] == [min(count, 100) for count in tokens]
    assert (made.ends - made.starts).tolist() == tokens
    assert not made.queries
    between = [[sum(tokens[min(a, b) + 1 : max(a, b)]) for b in range(5)] for a in range(5)]
    rows = np.arange(5)
    assert np.array_equal(made.apart(rows[:, None], rows), np.array(between) >= 96)
    longer = sum(count > 100 for count in tokens)
    assert f"{longer} of 5 passages" in caplog.text
    assert longer


def test_longer_passages_are_as_long_and_far_as_they_say(tokenizer):
    lengths, body = Lengths(126), text(900, 0)
    made = make_passages([body], tokenizer, lengths=lengths)
    assert {len(ids) - 2 for ids in made.ids} == {126}
    assert set(np.diff(made.starts)) <= {128, 256}
    assert (lengths.window, lengths.far, lengths.long) == (128, 222, 384)
    hits = made.distant(np.ones((len(made.ids),) * 2, np.float32) - np.eye(len(made.ids), dtype=np.float32))
    assert not np.isnan(hits).any()


def test_passages_of_no_document_have_no_value(tokenizer):
    none = make_passages([], tokenizer)
    assert (none.scorable.tolist(), none.distant(np.zeros((0, 0))).tolist()) == ([], [])


def test_headings_equal_a_plain_writing():
    passages, _, scores = drawn([8, 3, 2, 5])
    expected = np.zeros((4, 2))
    for query, target in enumerate(passages.targets):
        best = [scores[query, passages.owners == document].max() for document in range(4)]
        expected[target] += [all(best[target] > other for d, other in enumerate(best) if d != target), 1]
    found = passages.headings(scores)
    assert np.array_equal(found, expected)
    assert share(found) == pytest.approx(expected[:, 0].sum() / 12)


def test_compared_leaves_out_documents_without_headings():
    """Most documents have none: a draw of documents without any would have no score."""
    start = np.zeros((400, 2))
    start[:110, 1] = 2
    better = start.copy()
    better[:110:2, 0] = 1
    found = compared({HEADINGS: start}, {HEADINGS: better}, 0)[HEADINGS]
    assert (found.rows, found.difference) == (110, 0.25)
    assert 0 < found.interval[0] < 0.25 < found.interval[1] < 0.5


def test_scores_that_tell_nothing_apart_find_nothing():
    passages, scores, headings = drawn([8, 4, 4])
    assert not np.nan_to_num(passages.distant(np.zeros_like(scores))).any()
    assert not passages.headings(np.zeros_like(headings))[:, 0].any()


def test_make_passages_takes_headings_out_and_leaves_common_ones_out(tokenizer):
    bodies = [text(300, 0), text(200, 1), "too short"]
    documents = [
        f"A title of its own\n\n# Introduction here\n{bodies[0]}\n## Results of word1\n",
        f"# Introduction here\n{bodies[1]}",
        f"# Another one\n{bodies[2]}",
    ]
    made = make_passages(documents, tokenizer)
    assert made.num_documents == 2
    assert made.queries == ["A title of its own", "Results of word1"]
    assert made.targets.tolist() == [0, 0]
    assert all(not any(heading in passage for heading in made.queries) for passage in made.texts)
    assert np.bincount(made.owners).max() <= 8
    for ids, passage, owner, start in zip(made.ids, made.texts, made.owners, made.starts, strict=True):
        every = tokenizer(bodies[owner], add_special_tokens=False)["input_ids"]
        assert ids[1:-1] == every[start : start + 62]
        assert [ids[0], ids[-1]] == [tokenizer.cls_token_id or tokenizer.bos_token_id, tokenizer.eos_token_id]
        assert passage.strip() in bodies[owner]


def test_long_first_lines_without_spaces_stay_and_short_ones_are_headings(tokenizer):
    long = "日本語の文章は空白で区切られない。" * 4
    documents = [f"{long}\n{text(300, 0)}", f"# 見出しの例\n{text(300, 1)}"]
    made = make_passages(documents, tokenizer)
    assert made.queries == ["見出しの例"]
    assert long[:10] in made.texts[0]


def test_make_passages_of_documents_without_headings_has_no_queries(tokenizer):
    made = make_passages([text(300, 0)], tokenizer)
    assert made.queries == []
    assert np.isnan(share(made.headings(np.zeros((0, len(made.texts))))))


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
    found = paragraph_pairs({"test": [block]}, tokenizer)["test"]
    assert found.queries == ([query] if query else [])
    for answer in found.answers:
        assert REST.startswith(answer)
        assert len(tokenizer(answer, add_special_tokens=False)["input_ids"]) <= 62


def test_what_two_documents_share_searches_nothing_and_a_document_gives_at_most_four(tokenizer):
    shared = f"{sentence('the licence')} {REST}"
    rest = [f"{REST} Part {number} of {name} ends." for name in "ab" for number in range(9)]
    paragraphs = [f"{sentence(f'number {number}')} {text}" for number, text in enumerate(rest)]
    documents = ["\n\n".join([shared, *paragraphs[:9]]), "\n\n".join([shared, *paragraphs[9:12]]), "nothing"]
    found = paragraph_pairs({"test": documents}, tokenizer)["test"]
    assert found.owners.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert sentence("the licence") not in found.queries
    assert found.queries[0] == sentence("number 0")
    assert found.queries[3] == sentence("number 8"), "spread over the document"


@pytest.mark.parametrize(("asking", "question"), [(100, True), (99, False)])
def test_questions_search_if_a_hundred_documents_have_one(tokenizer, asking, question):
    documents = [
        f"# What is thing {number}?\n\n{sentence(f'thing {number}')} {REST} Of thing {number}."
        if number < asking
        else f"{sentence(f'thing {number}')} {REST} Of thing {number}."
        for number in range(120)
    ]
    more = [f"# What is other {number}?\n\n{REST} Of other {number}." for number in range(100)]
    found = paragraph_pairs({"development": more, "test": documents}, tokenizer)
    assert len(found["test"].queries) == (asking if question else 120)
    assert all(query.endswith("?") == question for part in found.values() for query in part.queries)


def test_recall_counts_by_document_and_a_tie_is_no_hit():
    found = Paragraphs(["a", "b", "c"], ["x", "y", "z"], np.array([0, 0, 2]), 3)
    scores = np.array([[3, 1, 2], [1, 1, 0], [0, 1, 2]], np.float32)
    assert found.recall(scores).tolist() == [[1, 2], [0, 0], [1, 1]]


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


def test_start_with_an_encoder_that_has_changed_is_refused(tmp_path):
    for _ in range(2):
        with opened(CONFIG, tmp_path) as state:
            state.check("first")
            state.write(start="first")
    with opened(CONFIG, tmp_path) as state, pytest.raises(UsageError, match=all_of("encoder has changed", "folder")):
        state.check("second")


def test_opened_with_another_encoder_is_refused(tmp_path):
    with opened(CONFIG, tmp_path) as state:
        state.write(steps=77)
    with (
        pytest.raises(UsageError, match=all_of("another encoder", "another folder")),
        opened(CONFIG.model_copy(update={"encoder": "models/y"}), tmp_path),
    ):
        pass


def test_opened_with_a_damaged_file_is_refused(tmp_path):
    (tmp_path / STATE).write_text("{")
    with pytest.raises(UsageError, match=all_of("damaged", "delete", "candidates")), opened(CONFIG, tmp_path):
        pass
