"""Encoders of other languages by folder: SentencePiece, cased WordPiece, tokenizers that lack some special token."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer
from vocabularies import ROLES, unigram, wordpiece

from declutr.common.errors import ConfigError, EncoderError
from declutr.encoders.loading import load_encoder
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, load_tokenizer

TEXTS = ["你好，世界。", "Eine Frau läuft.", "Быстрая лиса", "", "naïve façade ✓ ﬁ", "东京" * 60, "L’été à Noël"]
_SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


SAMPLE = [text * 5 for text in TEXTS if len(text) < 50]


def lacking(*roles, **options):
    """A Unigram tokenizer without tokens of these roles."""
    kept = {role: name for role, name in ROLES.items() if role not in ("cls", "sep", *roles)}
    return lambda: unigram(SAMPLE, 300, kept, **options)


KINDS = {
    "xlm-roberta": ("xlm-roberta", lacking()),
    "camembert": ("camembert", lacking()),
    "no mask token": ("roberta", lacking("bos", "mask")),
    "no padding token": ("bert", lacking("pad")),
    "no token around a text": ("bert", lacking("bos", "eos", ends=False)),
    "cased WordPiece": ("bert", lambda: wordpiece(SAMPLE, 300, lowercase=False)),
}


def write_encoder(folder, kind):
    family, make = KINDS[kind]
    tokenizer = make()
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")}
    settings = _SHAPE | {"max_position_embeddings": 40, "initializer_range": 0.3, "vocab_size": len(tokenizer)}
    known = {name: value for name, value in ids.items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.for_model(family, **settings, **known)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_transformers(tmp_path, kind):
    folder = write_encoder(tmp_path, kind)
    encoder = load_encoder(str(folder), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for text, embedding in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=encoder.max_tokens)
        if not inputs["input_ids"].numel():
            assert not embedding.any()  # a text without tokens has the embedding 0, and no NaN
            continue
        with torch.no_grad():
            hidden = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        np.testing.assert_allclose(embedding, hidden[0].mean(0).numpy(), atol=2e-6, err_msg=text)


def test_texts_without_tokens_are_embedded_among_windows(tmp_path):
    folder = write_encoder(tmp_path, "no token around a text")
    encoder = load_encoder(str(folder), device="cpu", max_tokens=8, long_texts="windows")
    embeddings = encoder.encode(["", "东京" * 60, ""])
    assert np.isfinite(embeddings).all()
    assert not embeddings[[0, 2]].any()
    assert embeddings[1].any()
    assert not encoder.encode([""]).any()


def test_a_vocabulary_alone_keeps_the_case_that_its_settings_name(tmp_path):
    """As older monolingual BERTs are published: `vocab.txt` and `do_lower_case`."""
    folder = write_encoder(tmp_path, "cased WordPiece")
    whole = load_tokenizer(str(folder))
    vocabulary = whole.get_vocab()
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(vocabulary, key=vocabulary.get)))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    alone = load_tokenizer(str(folder))
    for text in TEXTS:
        assert alone(text)["input_ids"] == whole(text)["input_ids"], text
    info = describe_tokenizer(alone, "pretrained")
    assert (info.bos_token_id, info.eos_token_id, info.pad_token_id, info.mask_token_id) == (2, 3, 0, 4)


def test_a_sentencepiece_file_alone_is_refused_with_the_remedy(tmp_path):
    folder = write_encoder(tmp_path, "xlm-roberta")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "sentencepiece.bpe.model").write_bytes(b"\n\x0b\n\x03<s>\x15\x00\x00\x00\x00\x18\x03")
    remedy = "only a SentencePiece file; install sentencepiece, or add a tokenizer.json"
    with pytest.raises(ConfigError, match=remedy):
        load_tokenizer(str(folder))
    with pytest.raises(EncoderError, match=remedy):
        load_encoder(str(folder))
