"""Texts of known likeness."""

import numpy as np

VOCABULARY = np.array([f"w{number:x}" for number in range(20_000)])


def zipf_text(rng: np.random.Generator, num_words: int) -> str:
    """Words as frequent as in natural text, so that unrelated texts share their common n-grams."""
    ranks = np.exp(rng.random(num_words) * np.log(len(VOCABULARY))).astype(int) - 1
    return " ".join(VOCABULARY[ranks])


def change(rng: np.random.Generator, text: str, share: float) -> str:
    """The text with a share of its words replaced by others."""
    words = np.array(text.split(), object)
    chosen = rng.random(len(words)) < share
    words[chosen] = rng.choice(VOCABULARY, chosen.sum())
    return " ".join(words)


def reorder(rng: np.random.Generator, text: str, paragraph_words: int = 60) -> str:
    """The text with its paragraphs in another order."""
    words = text.split()
    paragraphs = [words[start : start + paragraph_words] for start in range(0, len(words), paragraph_words)]
    return " ".join(" ".join(paragraphs[place]) for place in rng.permutation(len(paragraphs)))
