"""Texts of known likeness, and their keys on disk, as a preparation leaves them."""

import numpy as np

from declutr.pipeline.duplicates.keys import number, write_keys
from declutr.pipeline.duplicates.pairs import bucket_pairs
from declutr.pipeline.duplicates.shingles import Signer
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.readers.corpus import document_id

VOCABULARY = np.array([f"w{number:x}" for number in range(20_000)])


def zipf_text(rng, num_words):
    """Words as frequent as in natural text, so that unrelated texts share their common n-grams."""
    return " ".join(VOCABULARY[np.exp(rng.random(num_words) * np.log(len(VOCABULARY))).astype(int) - 1])


def change(rng, text, share):
    words = np.array(text.split(), object)
    chosen = rng.random(len(words)) < share
    words[chosen] = rng.choice(VOCABULARY, chosen.sum())
    return " ".join(words)


def reorder(rng, text, paragraph_words=60):
    words = text.split()
    paragraphs = [words[start : start + paragraph_words] for start in range(0, len(words), paragraph_words)]
    return " ".join(" ".join(paragraphs[place]) for place in rng.permutation(len(paragraphs)))


def write(folder, units, config, order=None):
    """Writes the keys of texts, a list for each unit; returns the units' names. Ordinals are 1, 4, 7, ..."""
    signer = Signer(config.near) if config.near else None
    names = [f"{index:05d}" for index in range(len(units))]
    for index in order if order is not None else range(len(units)):
        texts = [normalise(text) for text in units[index]]
        ids, ordinals = [document_id(text.encode()) for text in texts], [3 * row + 1 for row in range(len(texts))]
        write_keys(folder, names[index], config, ids, ordinals, [signer.sign(text) for text in texts] if signer else [])
    return names


def search(folder, names, config, num_buckets=1):
    documents, _, _ = number(folder, names)
    return [bucket_pairs(documents, config, bucket, num_buckets) for bucket in range(num_buckets)]
