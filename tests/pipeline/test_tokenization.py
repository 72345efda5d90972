"""Tokenizers of every kind on text in many scripts, and the ones that `prepare` trains."""

import json

import numpy as np
import pytest
from corpora import sentence
from messages import all_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from vocabularies import MASK, unigram, wordpiece

from declutr.common.errors import ConfigError
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.tokenizer import batch_tokenizer
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer, choose_engine, difficult_texts
from declutr.pipeline.tokenizer.tokenization import (
    _cut_runs,
    describe_tokenizer,
    fingerprint,
    load_tokenizer,
    train_tokenizer,
)

TEXTS = {
    "de": "Die Müllabfuhr fährt früh über die Straße, weil große Lastwagen später stören würden. ",
    "fr": "L’été dernier, où l’on a déjà goûté « le vin », Noël approchait à pas feutrés ; naïveté ! ",
    "ru": "Быстрая лиса перепрыгнула через ленивую собаку, и никто её не заметил в тёмном лесу. ",
    "zh": "人工智能正在改变我们的生活。二〇二六年，许多人每天使用它写作、翻译和学习。",
    "ja": "東京は日本の首都であり、世界でも最大級の都市です。カタカナとひらがなも使います。",
    "th": "ภาษาไทยเขียนติดกันโดยไม่เว้นวรรคระหว่างคำ แต่เว้นวรรคระหว่างประโยค ",
    "ar": "اللغة العربية تُكتب من اليمين إلى اليسار، ولها حروف متصلة. ",
    "hi": "हिन्दी देवनागरी लिपि में लिखी जाती है और इसमें मात्राएँ होती हैं। ",
    "ko": "한국어는 띄어쓰기를 하지만 조사가 단어에 붙습니다. 서울은 대한민국의 수도입니다. ",
}
SAMPLE = [text * 3 for text in TEXTS.values()]
NO_ENDS = {"pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}


KINDS = {
    "trained": lambda: train_tokenizer(SAMPLE, 900),
    "xlm-roberta": lambda: unigram(SAMPLE, 900),
    "older xlm-roberta": lambda: unigram(SAMPLE, 900, before=[pre_tokenizers.WhitespaceSplit()]),
    "no ends": lambda: unigram(SAMPLE, 900, NO_ENDS, ends=False),
    "bert, cased": lambda: wordpiece(SAMPLE, 900, lowercase=False),
    "bert, uncased": lambda: wordpiece(SAMPLE, 900, lowercase=True),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    KINDS[request.param]().save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def encoder(folder):
    """The tokenizer as `prepare` applies it."""
    return BatchTokenizer.load(folder, choose_engine(folder, "auto", TEXTS.values())[0])


def test_ids_are_those_of_the_saved_tokenizer_and_no_script_is_unknown_or_much_longer_than_its_letters(folder, encoder):
    tokenizer = load_tokenizer(str(folder))
    for text in [*TEXTS.values(), *map(normalise, TEXTS.values()), " ".join(TEXTS.values())]:
        (ids,) = encoder.encode([text])
        expected = tokenizer(encoder.prefix + text, add_special_tokens=False)["input_ids"]
        np.testing.assert_array_equal(ids, expected)
    assert len(encoder.encode([""])[0]) == 0
    assert fingerprint(load_tokenizer(str(folder))) == fingerprint(tokenizer)
    info = describe_tokenizer(load_tokenizer(str(folder)), "pretrained")
    for language, text in TEXTS.items():
        (ids,) = encoder.encode([text * 3])
        assert info.unk_token_id not in ids, language
        assert len(ids) < 1.05 * len(text * 3), language


def test_special_tokens_spelled_out_are_ordinary_text(folder, encoder):
    """A Unigram model holds them as pieces and would find them."""
    tokenizer = load_tokenizer(str(folder))
    specials = tokenizer.all_special_tokens
    texts = [*specials, "".join(specials), "中文".join(specials), " ".join(f"a{name} {name}b" for name in specials)]
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        unknown = tokenizer.unk_token_id  # a sign that no text of the sample has
        assert not set(ids.tolist()) & (set(tokenizer.all_special_ids) - {unknown}), text
        assert len(ids) > 1, text


@pytest.mark.parametrize("model", ["WordPiece", "WordLevel"])
def test_special_tokens_that_a_word_spells_are_unknown_or_other_tokens(tmp_path, model):
    """A pre-tokenizer that leaves signs in words gives them to the model, whose vocabulary holds them."""
    names = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "word", "[", "]", "M"]
    backend = Tokenizer(getattr(models, model)({name: n for n, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(names[:5])
    backend.save(str(tmp_path / "tokenizer.json"))
    encoder = BatchTokenizer.load(tmp_path)
    for text in ("word [MASK] word", "[SEP]", "\0[CLS] \0 [PAD]", "word[MASK]"):
        (ids,) = encoder.encode([text])
        assert set(ids.tolist()) <= {0, 5, 6, 7, 8}, text
    assert encoder.encode(["word word"])[0].tolist() == [5, 5]


def test_a_tokenizer_that_draws_its_ids_is_refused(tokenizer, tmp_path):
    tokenizer.save_pretrained(str(tmp_path))
    path = tmp_path / "tokenizer.json"
    parsed = json.loads(path.read_text())
    parsed["model"]["dropout"] = 0.1
    path.write_text(json.dumps(parsed))
    with pytest.raises(ConfigError, match=all_of("dropout", "0.1", "null")):
        load_tokenizer(str(tmp_path))


def test_long_texts_are_cut_where_nothing_changes(folder, encoder, monkeypatch):
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [*difficult_texts(backend), " ".join(TEXTS.values()) * 3, "a b\u200b c \u037ad \u0301e f\u3000 g h" * 9]
    texts += ["one  two \n three\n\n four it's " * 50, " \n a" * 100]
    texts = [text for text in texts if len(text) < 2000]
    whole = encoder.encode(texts)
    monkeypatch.setattr(batch_tokenizer, "_PIECE_CHARACTERS", 7)
    monkeypatch.setattr(batch_tokenizer, "_BATCH_CHARACTERS", 50)
    for text, mine, expected in zip(texts, encoder.encode(texts), whole, strict=True):
        np.testing.assert_array_equal(mine, expected, err_msg=text)


def test_sentencepiece_texts_are_cut(tmp_path, monkeypatch):
    KINDS["xlm-roberta"]().save_pretrained(str(tmp_path))
    monkeypatch.setattr(batch_tokenizer, "_PIECE_CHARACTERS", 40)
    pieces = [piece for _, piece in BatchTokenizer.load(tmp_path)._pieces([TEXTS["ru"] * 5, TEXTS["zh"] * 5])]
    assert max(map(len, pieces[:-1])) < 60
    assert pieces[-1] == TEXTS["zh"] * 5  # it has no space


def test_letters_without_a_break_are_cut_for_training():
    """The trainer's time grows with the square of a run of letters: 300,000 characters took minutes."""
    letters = [character for character in TEXTS["zh"] + TEXTS["ja"] if character.isalpha()]
    text = "".join(letters[place * place % len(letters)] for place in range(100_000))
    parts = list(_cut_runs(f" {text} a b"))
    assert "".join(parts) == f" {text} a b"
    assert max(map(len, parts)) <= 1025
    assert len(train_tokenizer([text, "a b"], 600)) > 261


def test_texts_without_such_runs_train_the_same_tokenizer_as_before():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", MASK],
    )
    backend.train_from_iterator([f" {text}" for text in SAMPLE], trainer)
    assert backend.get_vocab() == train_tokenizer(SAMPLE, 600).get_vocab()


def test_a_trained_tokenizer_is_robertas_in_kind_and_survives_being_saved(tokenizer, tmp_path):
    tokenizer.save_pretrained(str(tmp_path))
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert fingerprint(loaded) == fingerprint(tokenizer)
    info = describe_tokenizer(loaded, "train")
    assert (info.bos_token_id, info.pad_token_id, info.eos_token_id, info.unk_token_id, info.mask_token_id) == (
        *range(5),
    )
    assert info.vocab_size == len(loaded) <= 300
    assert info.special_ids == [0, 1, 2, 3, 4]
    ids = loaded("the <mask> span", "x")["input_ids"]
    assert (ids[0], ids[-1]) == (0, 2)
    assert loaded.decode(ids) == "<s>the<mask> span</s></s>x</s>"


def test_training_twice_gives_the_same_fingerprint_which_ignores_truncation_and_padding(tokenizer):
    again = train_tokenizer((sentence(number, 60) for number in range(50)), 300)
    assert fingerprint(again) == fingerprint(tokenizer)
    assert fingerprint(train_tokenizer((sentence(number, 60) for number in range(50)), 290)) != fingerprint(tokenizer)
    before = fingerprint(tokenizer)
    tokenizer(["a b c", "a"], truncation=True, max_length=2, padding=True)
    assert fingerprint(tokenizer) == before


def test_a_tokenizer_that_is_nowhere_is_a_problem_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="no-such-tokenizer"):
        load_tokenizer(str(tmp_path / "no-such-tokenizer"))
