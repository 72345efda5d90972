"""The closed form: embeddings whitened by their covariance within documents, without training.

It is WCCN of speaker recognition (Hatch et al. 2006). Directions in which the spans of one document differ from each
other are shrunk, so that what they share counts more. It is DeCLUTR's signal without training: spans of a document
belong together. Legend: S spans, D embedding size.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from declutr.common.console.logs import bar
from declutr.common.errors import UsageError
from declutr.common.storage import atomic_folder
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import unit_rows
from declutr.encoders.transformer import TransformerEncoder, write_transformer
from declutr.pipeline.shards.shards import ShardSet, ragged
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.behind import Dense, Normalize
from declutr.trainer.model.language_model import vocabulary_of

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class WithinSums:
    """Sums over documents from which the whitening follows; those of several blocks of documents add up.

    Attributes:
        scatter: `(D, D)` sum over spans of (e - m)(e - m)^T, with m the mean of the span's document.
        total: `(D,)` sum of the embeddings.
        spans: number of spans.
        documents: number of documents.
    """

    scatter: F64
    total: F64
    spans: int
    documents: int

    @staticmethod
    def of(embeddings: NDArray[np.floating], owners: NDArray[np.int64]) -> "WithinSums":
        """The sums of one block; embeddings are scaled to length 1 first.

        Args:
            embeddings: `(S, D)` embeddings of spans.
            owners: `(S,)` number of the document of each span, within the block.
        """
        unit = unit_rows(embeddings.astype(np.float64))
        _, rows, counts = np.unique(owners, return_inverse=True, return_counts=True)
        means = np.zeros((len(counts), unit.shape[1]))
        np.add.at(means, rows, unit)
        apart = unit - (means / counts[:, None])[rows]
        return WithinSums(apart.T @ apart, unit.sum(axis=0), len(unit), len(counts))

    def __add__(self, other: "WithinSums") -> "WithinSums":
        return WithinSums(
            self.scatter + other.scatter,
            self.total + other.total,
            self.spans + other.spans,
            self.documents + other.documents,
        )


def whitening(sums: WithinSums, power: float, shrinkage: float) -> F64:
    """`(D, D)` symmetric matrix W = C^-power, to be applied to unit embeddings.

    C is the covariance within documents, scatter / (S - documents), shrunk to the identity and scaled to a mean
    eigenvalue of 1: C = (S / mean + shrinkage * I) / (1 + shrinkage). With a shrinkage above 0 it is invertible for any
    number of documents, also for fewer than D.

    Args:
        sums: of all documents.
        power: 0 changes nothing, 0.5 whitens completely.
        shrinkage: weight of the identity.

    Raises:
        UsageError: no document has two spans, or the spans of each document have the same embedding.
    """
    degrees = sums.spans - sums.documents
    if degrees < 1:
        raise UsageError(
            f"{sums.documents:,} documents with one span each: the covariance within documents needs two spans of a "
            "document; use longer documents or shorter spans"
        )
    values, vectors = np.linalg.eigh(sums.scatter / degrees)
    mean = float(values.mean())
    if not mean > 1e-12:
        raise UsageError(
            f"the {sums.spans:,} spans of {sums.documents:,} documents have the same embedding as the others of their "
            "document: there is nothing to whiten; check that the documents are not empty or repeated text"
        )
    shrunk = (np.maximum(values, 0.0) / mean + shrinkage) / (1 + shrinkage)
    matrix: F64 = (vectors * shrunk**-power) @ vectors.T
    return matrix


def passages(
    documents: pa.Table, count: int, max_content: int, vocabulary: Vocabulary
) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Token ids of at most `count` passages of each document, and the number of the document of each.

    A passage is the beginning of a window (pipeline/shards/windows.py), so passages do not overlap.

    Args:
        documents: n rows of the shards.
        count: passages of a document; a document with fewer windows has one for each.
        max_content: most tokens of a passage without special ones.
        vocabulary: ids of the tokenizer.

    Returns:
        The ids with special tokens, and `(S,)` document numbers from 0 to n - 1.
    """
    tokens, offsets = ragged(documents.column("tokens"))
    windows, bounds = ragged(documents.column("windows"))
    before = [] if vocabulary.bos is None else [vocabulary.bos]
    after = [] if vocabulary.eos is None else [vocabulary.eos]
    rows: list[list[int]] = []
    owners: list[int] = []
    for document in range(len(documents)):
        starts = windows[bounds[document] : bounds[document + 1]].astype(np.int64)
        length = min(int(starts[1] - starts[0]), max_content)
        chosen = starts[np.linspace(0, len(starts) - 1, min(count, len(starts))).round().astype(np.int64)]
        for start in (offsets[document] + chosen).tolist():
            rows.append([*before, *tokens[start : start + length].tolist(), *after])
            owners.append(document)
    return rows, np.array(owners, np.int64)


_BLOCK_DOCUMENTS = 256


@dataclass(frozen=True)
class WhitenConfig:
    """Settings of the closed form.

    Attributes:
        encoder: folder or name of a transformer, as `load_encoder` takes it, without a prompt.
        shards: absolute path of documents that `prepare` made with the encoder's tokenizer.
        power: of the covariance; 0.5 whitens completely.
        shrinkage: weight of the identity beside the covariance.
        passages: of a document that are embedded, spread evenly over it.
        passage_tokens: longest passage without special tokens; at most the windows of the shards.
        trust_remote_code: run Python code that comes with the encoder; only for encoders that the user trusts.
    """

    encoder: str
    shards: str
    power: float = 0.25
    shrinkage: float = 0.1
    passages: int = 4
    passage_tokens: int = 62
    trust_remote_code: bool = False


def whiten(config: WhitenConfig, output: Path, address: str | None = None) -> WithinSums:
    """Writes the whitened encoder to the new folder `output`; returns the sums from which it was computed.

    Raises:
        UsageError: there are no training documents, or they have no covariance.
        EncoderError: the encoder cannot be loaded.
        ShardError: the shards cannot be read.
    """
    encoder = _load(config)
    sums = within_sums(config, address)
    with atomic_folder(output) as aside:
        write_whitened(config, encoder, sums, aside)
    return sums


def _load(config: WhitenConfig) -> TransformerEncoder:
    encoder = load_encoder(config.encoder, trust_remote_code=config.trust_remote_code)
    assert isinstance(encoder, TransformerEncoder)
    return encoder


def within_sums(config: WhitenConfig, address: str | None = None) -> WithinSums:
    """The sums over all training documents of the shards, by one pass of Ray Data, in blocks of documents.

    Raises:
        SessionError: no Ray session can be started.
    """
    from declutr.common.session import start_ray

    start_ray(address=address)
    import ray  # after the session, which keeps it quiet

    num_documents = ShardSet(Path(config.shards), "train").num_documents
    if not num_documents:
        raise UsageError(f"{config.shards}: holds no training documents; prepare more documents")
    starts = range(0, num_documents, _BLOCK_DOCUMENTS)
    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    share: dict[str, Any] = {"num_gpus": 1, "concurrency": gpus} if gpus else {"num_cpus": 1, "concurrency": cpus}
    share["concurrency"] = max(1, min(share["concurrency"], len(starts)))
    blocks = [{"start": start, "end": min(start + _BLOCK_DOCUMENTS, num_documents)} for start in starts]
    rows = ray.data.from_items(blocks, override_num_blocks=len(blocks)).map(
        SumsOfBlock, fn_constructor_kwargs={"config": config}, **share
    )
    sums_by_start: dict[int, WithinSums] = {}
    with bar(total=num_documents, desc="covariance", unit="documents") as progress:
        for row in rows.iter_rows():
            sums = WithinSums(row["scatter"], row["total"], row["spans"], row["documents"])
            sums_by_start[row["start"]] = sums
            progress.update(sums.documents)
    first, *rest = [sums_by_start[start] for start in starts]  # added in their order, whatever finished first
    return sum(rest, first)


class SumsOfBlock:
    """Ray worker with an encoder: from the numbers of a block's documents to the block's sums."""

    def __init__(self, config: WhitenConfig) -> None:
        self._config = config
        self._encoder = _load(config)
        self._shards = ShardSet(Path(config.shards), "train", look=False)

    def __call__(self, row: dict[str, int]) -> dict[str, Any]:
        """Embed the passages of documents [start, end); return the fields of `WithinSums` and `start`."""
        documents = self._shards.take(np.arange(row["start"], row["end"]))
        encoder, config = self._encoder, self._config
        vocabulary = vocabulary_of(encoder.tokenizer)
        room = min(config.passage_tokens, encoder.max_tokens - vocabulary.num_specials)
        rows, owners = passages(documents, config.passages, room, vocabulary)
        return {"start": row["start"], **asdict(WithinSums.of(encoder.embed_ids(rows), owners))}


def write_whitened(config: WhitenConfig, encoder: TransformerEncoder, sums: WithinSums, folder: Path) -> None:
    """Writes the encoder with the whitening behind its own steps: scale to length 1, dense layer, scale to length 1."""
    matrix = whitening(sums, config.power, config.shrinkage)
    layer = nn.Linear(len(matrix), len(matrix), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(matrix))
    write_transformer(encoder, [Normalize(), Dense(layer, nn.Identity()), Normalize()], folder)
