"""Word vectors on tokenized data, as SentEval's `examples/bow.py` has them."""

import io

import numpy as np
import pytest
from sentevaldata import COMPLETE

from declutr.common.words import has_other_words
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import unit_rows
from declutr.encoders.words import HashedWords, words_of
from declutr.evaluation.senteval.data.loading import load
from declutr.evaluation.senteval.data.taskdata import sentences
from declutr.evaluation.senteval.data.tasks import find

TEXTS = ["i ca n't", "a film-maker 's U.S. debut", "The the", ".", "nothing known", "don\u00a0t caf\u00e9"]
LINES = ["ca 1 2", "n't 3 4", "n 9 9", "' 9 9", "t 5 5", "film-maker 7 1", "'s 2 2", "U.S. 4 6", "the 8 8", ". 1 1",
         "n't 30 40", "caf\u00e9 2 0"]  # fmt: skip


def official(path, texts):
    """`get_wordvec` and `batcher` of examples/bow.py, facebookresearch/SentEval@5d6dc11."""
    batch = [text.split() or ["."] for text in texts]
    word2id = {word for sentence in batch for word in sentence}
    word_vec = {}
    with io.open(path, "r", encoding="utf-8") as f:  # noqa: UP020
        for line in f:
            word, vec = line.split(" ", 1)
            if word in word2id:
                word_vec[word] = np.array(vec.split(), dtype=np.float64)
    size = len(vec.split())
    embeddings = []
    for sent in batch:
        sentvec = [word_vec[word] for word in sent if word in word_vec] or [np.zeros(size)]
        embeddings.append(np.mean(sentvec, 0))
    return np.vstack(embeddings)


@pytest.mark.parametrize("separator", [" ", "\t"])
def test_words_are_split_at_white_space_and_looked_up_as_they_stand(tmp_path, separator):
    path = tmp_path / "words.txt"
    path.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    expected = official(path, TEXTS)
    path.write_text("".join(line.replace(" ", separator) + "\n" for line in LINES), encoding="utf-8")
    for vocabulary in (None, {word for text in TEXTS for word in text.split()}):
        found = load_encoder(str(path), vocabulary=vocabulary, tokenized=True)
        np.testing.assert_allclose(found.encode(TEXTS), expected, rtol=1e-6)
    plain = load_encoder(str(path))
    np.testing.assert_array_equal(plain.encode(["i ca n't"]), [[(1 + 9 + 9 + 5) / 4, (2 + 9 + 9 + 5) / 4]])
    assert found.fingerprint != plain.fingerprint


def test_hashed_words_are_words_in_any_script():
    """Sentences that share words are nearer than others, also without spaces or with signs that follow letters."""
    encoder = HashedWords(4096)
    for near, far in (
        (("一个女人正在切洋葱。", "一个女人正在切土豆。"), "狗在公园里跑。"),
        (("क्या हिन्दी", "हिन्दी में"), "नमस्ते दुनिया"),
    ):
        one, two, other = unit_rows(encoder.encode([*near, far]))
        assert one @ two > one @ other + 0.2
    same = HashedWords(64).encode(["Words, and signs!"])
    assert not has_other_words("good \u2764\ufe0f! 1\ufe0f\u20e3")
    assert words_of("Words, and signs!") == ["Words", ",", "and", "signs", "!"]
    assert np.array_equal(same, HashedWords(64).encode(["words, and signs!"]))


@pytest.mark.skipif(not COMPLETE.exists(), reason="no real task data beside the repository")
def test_real_sentences_give_what_bow_gives(tmp_path):
    texts = sentences(load(find("MR"), COMPLETE))[::20]
    words = {word for text in texts for word in text.split()} | {word for text in texts for word in words_of(text)}
    numbers = np.random.default_rng(0).integers(-99, 100, (len(words), 3))
    path = tmp_path / "words.vec"
    lines = [f"{word} {' '.join(map(str, row))}\n" for word, row in zip(sorted(words), numbers, strict=True)]
    path.write_text("".join(lines), encoding="utf-8")
    found = load_encoder(str(path), tokenized=True).encode(texts)
    np.testing.assert_allclose(found, official(path, texts), rtol=1e-6)
    assert np.abs(load_encoder(str(path)).encode(texts) - found).max() > 1
