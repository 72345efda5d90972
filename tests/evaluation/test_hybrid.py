"""Hybrid indexes: scores of both parts, the weight, and words of any script."""

import numpy as np
import pytest
from folders import embed_rows, static_folder
from messages import says

from declutr.cli.main import main
from declutr.common.words import lexical_words, num_words
from declutr.embedding.build import index as build_index
from declutr.embedding.index import SearchIndex
from declutr.embedding.postings import StoredWords, write_words
from declutr.encoders.loading import load_encoder
from declutr.evaluation.retrieval.lexicon import Lexicon

ENCODER = "hashed-words:32"
TEXTS = ["the cat sat on the mat", "a dog barked", "the mat was red", "nobody knows the trouble", "cat cat mat", "zzz"]
QUERIES = ["cat on the mat", "dog dog", "the the the", "unknown"]


@pytest.fixture
def embedded(tmp_path):
    rows = [{"text": text, "name": f"n{place}"} for place, text in enumerate(TEXTS)]
    return embed_rows(tmp_path, rows, "--id-field", "name", encoder=ENCODER, suffix=".parquet")


def plain(query, kind):
    """Cosines and lexical scores of the texts."""
    vectors = load_encoder(ENCODER).encode([*TEXTS, query])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    lexicon = Lexicon(TEXTS)
    if kind == "idf":
        return vectors[:-1] @ vectors[-1], lexicon.idf_cosine([query])[0]
    known = {word for word in lexical_words(query) if word in lexicon.words}
    in_texts = np.array([sum(word in lexical_words(text) for text in TEXTS) for word in known])
    most = 2.2 * np.log1p((len(TEXTS) - in_texts + 0.5) / (in_texts + 0.5)).sum()
    return vectors[:-1] @ vectors[-1], lexicon.bm25([query])[0] / max(most, 1e-12)


@pytest.mark.parametrize("kind", ["idf", "bm25"])
def test_hybrid_score_is_cosine_plus_weighted_lexical_score(embedded, tmp_path, kind):
    build_index(embedded, tmp_path / "index", hybrid=True, lexical=kind, weight=0.7)
    index = SearchIndex(tmp_path / "index")
    for query in QUERIES:
        cosines, lexical = plain(query, kind)
        hits = index.hits(index.embed(load_encoder(ENCODER), query), 10, query)
        assert len(hits) == len(TEXTS)
        for hit in hits:
            assert hit.text == TEXTS[hit.row]
            parts = cosines[hit.row], lexical[hit.row]
            assert (hit.cosine, hit.lexical) == pytest.approx(parts, abs=1e-6)
            assert hit.score == pytest.approx(parts[0] + 0.7 * parts[1], abs=1e-6)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


@pytest.mark.parametrize("kind", ["idf", "bm25"])
def test_stored_words_of_many_texts_score_as_the_lexicon(tmp_path, kind):
    rng = np.random.default_rng(0)
    names = [f"w{number}é" for number in range(300)]
    texts = [" ".join(rng.choice(names, rng.integers(0, 30))) for _ in range(500)]
    assert write_words(tmp_path, texts, kind) == len(Lexicon(texts).words)
    stored, lexicon = StoredWords(tmp_path, 500, kind), Lexicon(texts)
    for query in (texts[3], " ".join(names), "w1é w1é w2é none", ""):
        expected = (lexicon.bm25 if kind == "bm25" else lexicon.idf_cosine)([query])[0]
        found = stored.scores(query)
        assert 0 <= found.min() <= found.max() <= 1 + 1e-6
        scale = expected.max() / found.max() if kind == "bm25" and found.any() else 1
        np.testing.assert_allclose(found * scale, expected, rtol=1e-5, atol=1e-6)


def test_search_shows_both_parts_and_takes_another_weight(embedded, tmp_path, capsys):
    given = ["index", str(embedded), "--output", str(tmp_path / "index"), "--hybrid", "--weight", "0.5"]
    assert main(given) == 0
    says(capsys.readouterr().out, "words", "14", "IDF cosine", "weight 0.5")
    (cosine, lexical) = (part[4] for part in plain("cat mat", "idf"))
    for option, weight in (([], 0.5), (["--weight", "2"], 2), (["--weight", "0"], 0)):
        assert main(["search", str(tmp_path / "index"), "cat mat", "--top", "1", *option]) == 0
        first = capsys.readouterr().out
        assert (
            first == f"{cosine + weight * lexical:6.3f} = {cosine:.3f} + {weight:g} x {lexical:.3f}  n4  cat cat mat\n"
        )


@pytest.mark.parametrize("weight", ["-1", "nan", "inf", "101"])
def test_weight_that_is_no_number_from_0_to_100_is_refused(embedded, tmp_path, capsys, weight):
    build_index(embedded, tmp_path / "plain")
    new = ["index", str(embedded), "--output", str(tmp_path / "i"), "--hybrid"]
    for command in (new, ["search", str(tmp_path / "plain"), "cat"]):
        assert main([*command, f"--weight={weight}"]) == 1
        says(capsys.readouterr().err, f"--weight {weight}", "0 to 100")
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize("options", [[], ["--hybrid", "--dtype", "int8"]])
def test_search_of_an_index_without_texts_says_so(tmp_path, capsys, options):
    output = embed_rows(tmp_path, [])
    assert main(["index", str(output), "--output", str(tmp_path / "index"), *options]) == 0
    assert main(["search", str(tmp_path / "index"), "cat"]) == 1
    says(capsys.readouterr().err, "no text")


@pytest.mark.parametrize("top", ["0", "-5"])
def test_search_for_fewer_than_one_text_is_refused(capsys, top):
    with pytest.raises(SystemExit):
        main(["search", "index", "cat", f"--top={top}"])
    says(capsys.readouterr().err, f"--top {top}", "at least 1")


def test_settings_that_need_words_are_refused_without_them(embedded, tmp_path, capsys):
    output = str(tmp_path / "index")
    for option in (["--weight", "1"], ["--lexical", "bm25"]):
        assert main(["index", str(embedded), "--output", output, *option]) == 1
        says(capsys.readouterr().err, option[0], "--hybrid")
    build_index(embedded, tmp_path / "index")
    assert main(["search", output, "cat", "--weight", "1"]) == 1
    says(capsys.readouterr().err, "--weight", "--hybrid")


def test_words_find_what_the_encoder_does_not_know(tmp_path, capsys):
    model = static_folder(tmp_path / "words", {"cat": [1, 0], "dog": [0, 1]})
    output = embed_rows(tmp_path, ["cat and dog", "RFC2119 dog"], encoder=str(model))
    folder = str(tmp_path / "index")
    assert main(["index", str(output), "--output", folder, "--hybrid"]) == 0
    capsys.readouterr()
    assert main(["search", folder, "rfc2119"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("RFC2119 dog")
    assert main(["search", folder, "neither"]) == 1
    says(capsys.readouterr().err, "encoder knows no word", "no text")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["search", folder, "\t "])
    says(capsys.readouterr().err, "empty")
    assert main(["search", folder, " ".join(f"w{number}" for number in range(10_000)) + " cat"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("cat and dog")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cat_2's CAFÉ, naïve", ["the", "cat_2", "s", "café", "naïve"]),
        ("e\u0301te\u0301", ["e\u0301te\u0301"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("東京Tower は", ["東", "京", "東京", "tower", "は"]),
        ("ไทย", ["ไ", "ท", "ย", "ไท", "ทย"]),
        ("한국어 단어", ["한국어", "단어"]),
        ("x" * 300, ["x" * 255]),
        ("... \U0001f98a", []),
    ],
)
def test_lexical_words_of_scripts(text, words):
    assert lexical_words(text) == words


@pytest.mark.parametrize(
    ("text", "number"), [("Introduction", 1), ("A short title", 3), ("見出し", 2), ("a 東京", 2), ("हिन्दी में", 2)]
)
def test_words_of_a_title_are_counted_in_any_script(text, number):
    assert num_words(text) == number
