from pathlib import Path

import numpy as np
import pytest
from corpora import sentence
from transformers import AutoTokenizer

from declutr.common.errors import ConfigError
from declutr.pipeline.tokenizer import batch_tokenizer as encoding
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, fingerprint, load_tokenizer, train_tokenizer

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers"


def encoder_of(tokenizer, folder):
    tokenizer.save_pretrained(str(folder))
    return BatchTokenizer.load(folder)


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


def test_training_twice_gives_the_same_tokenizer(tokenizer):
    again = train_tokenizer((sentence(number, 60) for number in range(50)), 300)
    assert fingerprint(again) == fingerprint(tokenizer)
    assert fingerprint(train_tokenizer((sentence(number, 60) for number in range(50)), 290)) != fingerprint(tokenizer)


def test_the_fingerprint_ignores_truncation_and_padding(tokenizer):
    before = fingerprint(tokenizer)
    tokenizer(["a b c", "a"], truncation=True, max_length=2, padding=True)
    assert fingerprint(tokenizer) == before


def test_ids_are_those_of_the_tokenizer_after_one_space_without_specials(tokenizer, tmp_path):
    encoder = encoder_of(tokenizer, tmp_path)
    texts = [sentence(1, 40), "", "naïve 東京 😀", "the"]
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        expected = tokenizer(" " + text, add_special_tokens=False)["input_ids"] if text else []
        np.testing.assert_array_equal(ids, expected)


def test_special_tokens_spelled_out_in_a_text_are_ordinary_text(tokenizer, tmp_path):
    (ids,) = encoder_of(tokenizer, tmp_path).encode(["a <mask> and </s> in <s>html</s><pad>"])
    assert min(ids) > 4
    assert tokenizer.decode(ids) == " a <mask> and </s> in <s>html</s><pad>"


def test_a_long_text_is_encoded_in_pieces_to_the_same_ids(tokenizer, tmp_path, monkeypatch):
    encoder = encoder_of(tokenizer, tmp_path)
    texts = [sentence(number, 300) + " it's 1,000 ''s ...  naïve é😀" for number in range(5)] + ["x" * 500]
    whole = encoder.encode(texts)
    monkeypatch.setattr(encoding, "_PIECE_CHARACTERS", 17)
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 50)
    for mine, expected in zip(encoder.encode(texts), whole, strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_a_tokenizer_that_is_nowhere_is_a_problem_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="no-such-tokenizer"):
        load_tokenizer(str(tmp_path / "no-such-tokenizer"))


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="real vocabularies are not on this machine")
@pytest.mark.parametrize(
    ("name", "prefix", "ids"), [("roberta-base", " ", [20920, 232]), ("bert-base-uncased", "", [7592, 2088])]
)
def test_real_vocabularies_give_their_known_ids(name, prefix, ids, tmp_path):
    tokenizer = load_tokenizer(str(REAL / name))
    encoder = encoder_of(tokenizer, tmp_path)
    assert fingerprint(load_tokenizer(str(tmp_path))) == fingerprint(tokenizer)
    assert tokenizer(prefix + "Hello world", add_special_tokens=False)["input_ids"] == ids
    assert list(encoder.encode(["Hello world"])[0]) == ids
