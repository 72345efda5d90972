"""Documents and an encoder for `declutr adapt`."""

import numpy as np
from folders import jsonl

WORDS = [f"word{number}" for number in range(300)]


def corpus(path, count, words=160):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(rng.choice(WORDS, 25), words)) for _ in range(count)]
    return jsonl(path, [{"text": f"# Heading of document {number}\n{text}"} for number, text in enumerate(texts)])
