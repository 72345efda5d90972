"""The candidates of an adaptation, from the cheapest to the dearest, each a folder that can be loaded.

The closed form whitens embeddings by their covariance within documents, without training. It is WCCN of speaker
recognition (Hatch et al. 2006). Directions in which the spans of one document differ from each other are shrunk, so
that what they share counts more. It is DeCLUTR's signal without training: spans of a document belong together. The
others are a training, and the closed form after it.

Legend: S spans, D embedding size.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from declutr.adaptation.checks import drop_moved, own_words
from declutr.adaptation.config import (
    BATCH_DOCUMENTS,
    DOCUMENTS,
    LENGTHS,
    PAIRS_DATA,
    PAIRS_FILE,
    AdaptConfig,
    document_lines,
)
from declutr.common.console.logs import bar
from declutr.common.errors import EncoderError, UsageError
from declutr.common.storage import atomic_folder, write_text
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import CutEncoder, role_prompts, unit_rows
from declutr.encoders.transformer import TransformerEncoder, write_transformer
from declutr.evaluation.retrieval.pairs import RetrievalTest
from declutr.pipeline.prepare import prepare
from declutr.pipeline.shards.shards import ShardSet, ragged
from declutr.pipeline.tokenizer.tokenization import fingerprint, load_tokenizer
from declutr.trainer.checkpoints.state import EXPORT
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.behind import Dense, Normalize
from declutr.trainer.model.language_model import prompt_ids, vocabulary_of
from declutr.trainer.train import train

F64 = NDArray[np.float64]
CLOSED, TRAINED, BOTH = "closed form", "trained", "trained, then closed form"
ORDER = CLOSED, TRAINED, BOTH  # all candidates, from the cheapest to the dearest
RUN = "run"  # name of the folder of the training, among those of the candidates
POWER = 0.25  # power of the inverse covariance; 0.5 whitens completely
SHRINKAGE = 0.1  # weight of the identity that is added to the covariance
_PASSAGES = 4  # passages of a document that the covariance is computed from, spread evenly over it
_PASSES = 20  # passes over the training documents, if there is time; more were not measured
_LEAST_STEPS = 20  # a shorter training is not started
_STEP_COST = 3.75  # time of a step relative to the embedding of as many tokens: the backward, and the update
_LOAD_SECONDS = 60.0  # seconds that a start of the training takes beside its steps, with room for a slow machine
_BLOCK_DOCUMENTS = 256  # documents embedded at a time
_TIMED_PASSAGES = 512  # passages that are embedded to measure the speed
FOLDS = 5  # parts of a small corpus, each of which is scored by a fit on the others


def load_transformer(name: str | Path, trust_remote_code: bool = False) -> TransformerEncoder:
    """Loads an encoder that can be adapted."""
    encoder = load_encoder(str(name), trust_remote_code=trust_remote_code)
    if isinstance(encoder, CutEncoder):
        raise EncoderError(
            f"{name}: truncate_dim = {encoder.size} cuts its embeddings behind all layers, and an adaptation adds "
            "a layer; remove it from config_sentence_transformers.json"
        )
    if not isinstance(encoder, TransformerEncoder):
        raise EncoderError(f"{name}: only a transformer can be adapted")
    return encoder


def load_start(config: AdaptConfig) -> TransformerEncoder:
    """Loads the encoder to adapt."""
    start = load_transformer(config.encoder, config.trust_remote_code)
    if (start.prompt or role_prompts(start.prompts)) and not start.pools_prompt:
        raise UsageError(f"{config.encoder}: leaves its prompt out of the pooling, which a training does not")
    passage = config.passage_tokens
    added = config.lengths.window - passage + len(prompt_ids(start.tokenizer, document_prompt(start)))
    if (most := start.max_tokens - added) < passage:
        raise UsageError(
            f"--passage-tokens {passage}: at most {most} for {config.encoder}, which reads {start.max_tokens} with "
            f"{added} of special tokens and prompt; lower it, or name an encoder that reads longer texts"
        )
    if fingerprint(start.tokenizer) != fingerprint(load_tokenizer(config.encoder, config.trust_remote_code)):
        raise UsageError(
            f"{config.encoder}: do_lower_case in its sentence_bert_config.json changes texts before its tokenizer, "
            "which alone prepares documents; set it to false there, and put a normalizer of type Lowercase into "
            "its tokenizer.json"
        )
    return start


def document_prompt(encoder: TransformerEncoder) -> str:
    """Text before every passage."""
    return encoder.in_role("document").prompt


def steps_within(
    seconds: float, tokens_per_second: float, num_documents: int, window_tokens: int = LENGTHS.window
) -> tuple[int, float]:
    """Steps of twenty passes, or as many as the time suffices for, and the seconds of 20; 0 steps if fewer than 20.

    About a third of the seconds is for what follows the training; the tokens per second are the start's in a forward.
    """
    # On average a query has 14 tokens, another anchor 5/6 of a window (Beta(4, 2)), a positive 4/6 (Beta(2, 4)): with
    # three queries of four anchors about half a window each; and 2 special tokens.
    step_tokens = 2 * BATCH_DOCUMENTS * (window_tokens // 2 + 2)
    step_seconds = step_tokens * _STEP_COST / tokens_per_second
    steps = int((seconds * 2 / 3 - _LOAD_SECONDS) / step_seconds)
    most_steps = max(_LEAST_STEPS, _PASSES * num_documents // BATCH_DOCUMENTS)
    return min(steps, most_steps) if steps >= _LEAST_STEPS else 0, (_LEAST_STEPS * step_seconds + _LOAD_SECONDS) * 3 / 2


def prepared_pairs(
    config: AdaptConfig, pairs: RetrievalTest, output: Path, address: str | None
) -> tuple[Path, int] | None:
    """Shards of the third of the pairs that is trained on, and their number of rows; None if none is."""
    if not config.train_on_pairs:
        return None
    train = pairs.part("train", config.seed, train=True)
    rows = zip(train.queries, train.relevant, strict=True)
    lines = [json.dumps({"query": query, "text": train.texts[row]}) for query, answers in rows for row in answers]
    file, folder, text = output / PAIRS_FILE, output / PAIRS_DATA, "\n".join(lines) + "\n"
    if folder.is_dir() and file.is_file() and file.read_bytes() != text.encode():  # a candidate may have learned them
        what = "the pairs that are trained on have changed since this adaptation began"
        raise UsageError(f"--pairs {config.pairs}: {what}; restore them, or name another folder in --output")
    write_text(file, text)
    return folder, prepare(config.prepare_pairs_config(file, folder, address)).totals["kept_train"]


@dataclass(frozen=True)
class CandidateBuilder:
    """Makes candidates in a folder; what exists there is kept."""

    config: AdaptConfig  # what to adapt
    data: Path  # the prepared corpus
    folder: Path  # folder for the candidates
    address: str | None = None  # address of a Ray cluster
    pairs: tuple[Path, int] | None = None  # shards of the pairs that are trained on, and their number of rows

    def place(self, name: str) -> Path:
        """Folder of a candidate."""
        return self.folder / name.replace(",", "").replace("%", "").replace(" ", "-")

    def load(self, name: str) -> TransformerEncoder:
        """Loads a candidate that exists."""
        return load_transformer(self.place(name), self.config.trust_remote_code)

    def of_documents(self, documents: Sequence[str], folder: Path) -> "CandidateBuilder":
        """A builder in a folder of its own, which prepares these documents, all of them to be trained on."""
        file, data, lines = folder / DOCUMENTS, folder / "data", document_lines(documents)
        # An unchanged file is not written again, because `prepare` compares its state with that of an earlier start.
        if not file.is_file() or file.read_text(encoding="utf-8") != lines:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(file, lines)
        drop_moved(data, file)
        changes = {"corpus": [], "passages": str(file), "format": "auto", "text_field": ["text"]}
        config = self.config.model_copy(update=changes)
        with own_words():
            prepare(config.prepare_config(data, self.address, held_out=0))
        return CandidateBuilder(config, data, folder / "candidates", self.address)

    def tokens_per_second(self, start: TransformerEncoder) -> float:
        """Speed of the start on this machine, by passages of the first training documents."""
        split, vocabulary = ShardSet(self.data, "train"), vocabulary_of(start.tokenizer, document_prompt(start))
        documents = split.take(np.arange(min(split.num_documents, _BLOCK_DOCUMENTS)))
        rows = passage_ids(documents, self.config.passage_tokens, vocabulary)[0][:_TIMED_PASSAGES]
        start.embed_ids(rows[:32])  # the first forward of a process is slow
        began = time.monotonic()
        start.embed_ids(rows)
        return sum(map(len, rows)) / max(1e-3, time.monotonic() - began)

    def make(self, name: str, start: TransformerEncoder, steps: int) -> None:
        """Makes a candidate of the training documents, unless it exists."""
        place, trust = self.place(name), self.config.trust_remote_code
        if place.is_dir():
            return
        if name == BOTH:
            self.make(TRAINED, start, steps)
        run = self.folder / RUN
        if name == TRAINED and not (run / EXPORT).is_dir():  # a stop after the training repeats nothing
            pooling, prompts = start.encoder.config.pooling, (start.in_role("query").prompt, document_prompt(start))
            config = self.config.train_config(self.data, run, steps, pooling, prompts, self.address, self.pairs)
            with own_words():
                train(config)
        with atomic_folder(place) as aside:
            if name in (CLOSED, BOTH):
                origin = start if name == CLOSED else self.load(TRAINED)
                write_whitened(origin, within_sums(origin, self.data, self.config.passage_tokens), aside)
            else:
                write_trained(start, load_transformer(run / EXPORT, trust), aside)


def write_trained(start: TransformerEncoder, trained: TransformerEncoder, folder: Path) -> None:
    """Writes the trained encoder with the start's longest input, prompts and final normalisation.

    An export of a training has the longest input that its positions allow, and no normalisation at the end.
    """
    ends = [Normalize()] if len(start.after) and isinstance(start.after[-1], Normalize) else []
    write_transformer(
        replace(trained, max_tokens=start.max_tokens, prompt=start.prompt, prompts=start.prompts), ends, folder
    )


@dataclass(frozen=True)
class WithinSums:
    """Sums over documents from which the whitening follows; those of several blocks of documents add up."""

    scatter: F64  # `(D, D)` sum over spans of (e - m)(e - m)^T, with m the mean of the span's document
    spans: int  # number of spans
    documents: int  # number of documents

    @staticmethod
    def of(
        embeddings: NDArray[np.floating],  # `(S, D)` embeddings of spans
        owners: NDArray[np.int64],  # `(S,)` number of the document of each span, within the block
    ) -> "WithinSums":
        """The sums of one block; embeddings are scaled to length 1 first."""
        unit = unit_rows(embeddings.astype(np.float64))  # as they are compared: by cosine
        _, rows, counts = np.unique(owners, return_inverse=True, return_counts=True)
        means = np.zeros((len(counts), unit.shape[1]))
        np.add.at(means, rows, unit)
        apart = unit - (means / counts[:, None])[rows]
        return WithinSums(apart.T @ apart, len(unit), len(counts))

    def __add__(self, other: "WithinSums") -> "WithinSums":
        sums = self.scatter + other.scatter, self.spans + other.spans, self.documents + other.documents
        return WithinSums(*sums)


def whitening(sums: WithinSums) -> F64:
    """`(D, D)` symmetric matrix W = C^-power, to be applied to unit embeddings; a power of 0.5 whitens completely.

    C is the covariance within documents, scatter / (S - documents), shrunk to the identity and scaled to a mean
    eigenvalue of 1: C = (S / mean + shrinkage * I) / (1 + shrinkage). With a shrinkage above 0 it is invertible for any
    number of documents, also for fewer than D.
    """
    degrees = sums.spans - sums.documents
    if degrees < 1:  # a document of one span has no spread
        raise UsageError(
            f"{sums.documents:,} documents with one span each: the covariance within documents needs two spans of a "
            "document; use longer documents or shorter spans"
        )
    values, vectors = np.linalg.eigh(sums.scatter / degrees)
    mean = float(values.mean())
    if not mean > 1e-12:  # true for NaN, too
        raise UsageError(
            f"the {sums.spans:,} spans of {sums.documents:,} documents have the same embedding as the others of their "
            "document: there is nothing to whiten; check that the documents are not empty or repeated text"
        )
    shrunk = (np.maximum(values, 0.0) / mean + SHRINKAGE) / (1 + SHRINKAGE)  # rounding makes zeros negative
    return (vectors * shrunk**-POWER) @ vectors.T


def passage_ids(
    documents: pa.Table, max_content: int, vocabulary: Vocabulary
) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Token ids of at most four passages of each of n documents, and `(S,)` number of the document of each, from 0.

    A passage is the beginning of a window (pipeline/shards/windows.py), so passages do not overlap. A document with
    fewer windows has one for each. The ids include special tokens, of which `max_content` counts none.
    """
    tokens, offsets = ragged(documents.column("tokens"))
    windows, bounds = ragged(documents.column("windows"))
    before = [*([] if vocabulary.bos is None else [vocabulary.bos]), *vocabulary.prompt]
    after = [] if vocabulary.eos is None else [vocabulary.eos]
    rows: list[list[int]] = []
    owners: list[int] = []
    for document in range(len(documents)):
        starts = windows[bounds[document] : bounds[document + 1]].astype(np.int64)
        # A kept document has two windows or more; their distance is their length, but the last may be longer.
        length = min(int(starts[1] - starts[0]), max_content)
        chosen = starts[np.linspace(0, len(starts) - 1, min(_PASSAGES, len(starts))).round().astype(np.int64)]
        for start in (offsets[document] + chosen).tolist():
            rows.append([*before, *tokens[start : start + length].tolist(), *after])
            owners.append(document)
    return rows, np.array(owners, np.int64)


def within_sums(encoder: TransformerEncoder, shards: Path, passage_tokens: int = LENGTHS.passage) -> WithinSums:
    """The sums over all training documents of shards that `prepare` made with the encoder's tokenizer."""
    split, vocabulary = ShardSet(shards, "train"), vocabulary_of(encoder.tokenizer, document_prompt(encoder))
    if not split.num_documents:
        raise UsageError(f"{shards}: holds no training documents; prepare more documents")
    room = min(passage_tokens, encoder.max_tokens - vocabulary.num_specials)
    sums: WithinSums | None = None
    with bar(total=split.num_documents, desc="covariance", unit="documents") as progress:
        for start in range(0, split.num_documents, _BLOCK_DOCUMENTS):  # so that memory does not grow with the corpus
            documents = split.take(np.arange(start, min(start + _BLOCK_DOCUMENTS, split.num_documents)))
            rows, owners = passage_ids(documents, room, vocabulary)
            block = WithinSums.of(encoder.embed_ids(rows), owners)
            sums = sums + block if sums else block
            progress.update(block.documents)
    assert sums is not None
    return sums


def write_whitened(encoder: TransformerEncoder, sums: WithinSums, folder: Path) -> None:
    """Writes the encoder with the whitening behind its own steps: scale to length 1, dense layer, scale to length 1."""
    matrix = whitening(sums)
    layer = nn.Linear(len(matrix), len(matrix), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(matrix))  # symmetric, so Linear's transposition changes nothing
    write_transformer(encoder, [Normalize(), Dense(layer, nn.Identity()), Normalize()], folder)
