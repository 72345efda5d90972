"""Questions and first sentences that search: which ones are taken from documents, and how they are scored."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from declutr.adaptation.paragraphs import Paragraphs, paragraph_pairs
from declutr.pipeline.tokenizer.tokenization import train_tokenizer

REST = " ".join(f"Sentence {number} follows with more words." for number in range(6))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([REST] * 20, 400).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


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
