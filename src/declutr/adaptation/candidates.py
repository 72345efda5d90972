"""The candidates of an adaptation, from the cheapest to the dearest, each a folder that can be loaded."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from declutr.adaptation.config import BATCH_DOCUMENTS, PASSAGE_TOKENS, WINDOW_TOKENS, AdaptConfig, train_config
from declutr.adaptation.measures import Passages
from declutr.adaptation.scores import DISTANT, Values
from declutr.adaptation.whitening import WhitenConfig, WithinSums, whiten, whitening
from declutr.common.storage import atomic_folder
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import unit_rows
from declutr.encoders.transformer import TransformerEncoder, write_transformer
from declutr.trainer.checkpoints.state import EXPORT
from declutr.trainer.model.behind import Normalize
from declutr.trainer.train import train

CLOSED, TRAINED, BOTH = "closed form", "trained", "trained, then closed form"
SHARES = (0.25, 0.5, 0.75)
PASSES = 10
"""Passes over the training documents, if there is time."""
LEAST_STEPS = 20
_STEP_COST = 3.75
"""Time of a step relative to the embedding of as many tokens: the backward, and the update."""
_LOAD = 60.0
"""Seconds that a start of the training takes beside its steps, with room for a slow machine."""


def halfway(part: float) -> str:
    """Name of the candidate that is `part` of the way from the start to the trained encoder."""
    return f"trained, {part:.0%} of the way"


ORDER = (CLOSED, *(halfway(part) for part in SHARES), TRAINED, BOTH)
"""All candidates. An interpolation costs no more than the training that it needs, and changes the encoder less."""


@dataclass(frozen=True)
class CandidateBuilder:
    """Makes candidates in a folder; what exists there is kept.

    Attributes:
        config: what to adapt.
        data: the prepared corpus.
        folder: for the candidates.
        address: of a Ray cluster.
    """

    config: AdaptConfig
    data: Path
    folder: Path
    address: str | None = None

    def place(self, name: str) -> Path:
        """Folder of a candidate."""
        return self.folder / name.replace(",", "").replace("%", "").replace(" ", "-")

    def steps_within(self, seconds: float, tokens_per_second: float, num_documents: int) -> int:
        """Steps of ten passes, or as many as the time suffices for; 0 if fewer than 20.

        Args:
            seconds: time left for the training and for what follows it, which takes about a third of it.
            tokens_per_second: of the start's forward.
            num_documents: that are trained on.
        """
        tokens = 2 * BATCH_DOCUMENTS * (3 * WINDOW_TOKENS // 4 + 2)
        steps = int((seconds * 2 / 3 - _LOAD) * tokens_per_second / (tokens * _STEP_COST))
        return 0 if steps < LEAST_STEPS else min(steps, max(LEAST_STEPS, PASSES * num_documents // BATCH_DOCUMENTS))

    def make(self, name: str, start: TransformerEncoder, steps: int) -> Path:
        """Makes a candidate unless it exists; return its folder."""
        place = self.place(name)
        if place.is_dir():
            return place
        if name == TRAINED:
            run, pooling = self.folder / "run", start.encoder.config.pooling
            if not (run / EXPORT).is_dir():
                train(train_config(self.config, self.data, run, steps, pooling, self.address))
            with atomic_folder(place) as aside:
                write_trained(start, self._loaded(run / EXPORT), aside)
        elif name == CLOSED:
            whiten(self._whitening(self.config.encoder), place, self.address)
        elif name == BOTH:
            whiten(self._whitening(str(self.make(TRAINED, start, steps))), place, self.address)
        else:
            part = next(share for share in SHARES if halfway(share) == name)
            trained = self._loaded(self.make(TRAINED, start, steps))
            with atomic_folder(place) as aside:
                write_between(start, trained, part, aside)
        return place

    def _loaded(self, folder: Path) -> TransformerEncoder:
        encoder = load_encoder(str(folder), trust_remote_code=self.config.trust_remote_code)
        assert isinstance(encoder, TransformerEncoder)
        return encoder

    def _whitening(self, encoder: str) -> WhitenConfig:
        return WhitenConfig(
            encoder=encoder,
            shards=str(self.data),
            passage_tokens=PASSAGE_TOKENS,
            trust_remote_code=self.config.trust_remote_code,
        )


def write_trained(start: TransformerEncoder, trained: TransformerEncoder, folder: Path) -> None:
    """Writes the trained encoder with the start's longest input, prompts and final normalisation.

    An export of a training has the longest input that its positions allow, and no normalisation at the end.
    """
    ends = [Normalize()] if len(start.after) and isinstance(start.after[-1], Normalize) else []
    write_transformer(replace(trained, max_tokens=start.max_tokens, prompts=start.prompts), ends, folder)


def write_between(start: TransformerEncoder, trained: TransformerEncoder, part: float, folder: Path) -> None:
    """Writes the encoder whose weights are (1 - part) of the start's plus `part` of the trained one's.

    The object `trained` gets these weights and must not be used again.
    """
    pairs = [(start.encoder, trained.encoder), (start.after, trained.after)]
    with torch.no_grad():
        for before, after in pairs:
            for weight, end in zip(before.parameters(), after.parameters(), strict=True):
                end.copy_(torch.lerp(weight, end, part))
    write_transformer(trained, [], folder)


def wanted(steps: int) -> tuple[str, ...]:
    """The candidates that are tried; only the closed form if there is no time for a step of training."""
    return ORDER if steps else (CLOSED,)


_FOLDS = 5


def cross_fitted(
    passages: Passages, start: TransformerEncoder, power: float, shrinkage: float
) -> tuple[Values, Values]:
    """Values of the start and of the closed form, each document scored by a fit without it.

    A document's passages search among those of the documents of its fold, for both encoders.

    Args:
        passages: of all documents.
        start: the encoder.
        power: of the covariance.
        shrinkage: weight of the identity.

    Raises:
        UsageError: the documents of four folds have no covariance.
    """
    rows = unit_rows(start.embed_ids(passages.ids).astype(np.float64))
    before, after = (np.full(passages.num_documents, np.nan) for _ in range(2))
    fold_of = np.arange(passages.num_documents) % _FOLDS
    for fold in range(min(_FOLDS, passages.num_documents)):
        inside = fold_of[passages.owners] == fold
        matrix = whitening(WithinSums.of(rows[~inside], passages.owners[~inside]), power, shrinkage)
        fold_documents = np.flatnonzero(fold_of == fold)
        part = _of_documents(passages, fold_documents)
        for values, fold_rows in ((before, rows[inside]), (after, rows[inside] @ matrix)):
            unit = unit_rows(fold_rows)
            values[fold_documents] = part.distant((unit @ unit.T).astype(np.float32))
    return {DISTANT: before}, {DISTANT: after}


def _of_documents(passages: Passages, documents: np.ndarray) -> Passages:
    """The passages of some documents, numbered from 0."""
    inside = np.isin(passages.owners, documents)
    owners = np.searchsorted(documents, passages.owners[inside])
    return Passages([], [], owners, passages.starts[inside], [], np.empty(0, np.int64), len(documents))
