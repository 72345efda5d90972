"""Documents and an encoder for `declutr adapt`."""

import json

import numpy as np
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from declutr.pipeline.tokenizer.tokenization import train_tokenizer

WORDS = [f"word{number}" for number in range(300)]


def corpus(path, count, words=160):
    """Documents that each use a few words of their own."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(rng.choice(WORDS, 25), words)) for _ in range(count)]
    rows = [{"text": f"# Heading of document {number}\n{text}"} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_encoder(folder):
    """A folder with a tiny encoder with random weights."""
    train_tokenizer([" ".join(WORDS)] * 20, 1000).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=100, **shape)).save_pretrained(folder)
    return folder
