"""STS-B as a score of a validation: the correlation of cosines with people's judgements.

Legend: N pairs, H embedding size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.metrics.config import STSB
from declutr.trainer.model.behind import Dense
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.base import Validator
from declutr.trainer.objectives.held_out import embed_together
from declutr.trainer.objectives.row_score import RowScore
from declutr.trainer.parallel.communicator import Communicator

FILE = "sts-dev.csv"
_SCORE, _FIRST, _COLUMNS = 4, 5, 7  # columns of a line; some lines have notes behind them


class StsError(ValueError):
    """STS-B's file is missing or damaged."""


@dataclass(frozen=True)
class StsPairs:
    """Tokenized pairs.

    Attributes:
        ids: `2N` lists of token ids with specials: the first texts of all pairs, then the second ones.
        gold: N judgements, 0 to 5.
    """

    ids: list[list[int]]
    gold: list[float]


def read_pairs(folder: Path, file: str = FILE) -> list[tuple[float, str, str]]:
    """Judgement and texts of each pair of a file of STS-B, by default its development set.

    Raises:
        StsError: the file is missing or damaged; the message names it and the line.
    """
    path = folder / file
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StsError(f"{path}: {error}; name the folder of STS-B with {file}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = line.rstrip("\r").split("\t")
        try:
            score = float(fields[_SCORE])
            first, second = fields[_FIRST:_COLUMNS]
        except (ValueError, IndexError) as error:
            raise StsError(
                f"{path}, line {number}: expected at least {_COLUMNS} columns separated by tabs, the fifth a score"
            ) from error
        if not 0 <= score <= 5 or not first.strip() or not second.strip():
            raise StsError(f"{path}, line {number}: a score from 0 to 5 and two texts are needed")
        found.append((score, first, second))
    if len(found) < 2:
        raise StsError(f"{path}: {len(found)} pairs, at least 2 are needed")
    return found


def read_stsb(folder: Path, tokenizer: Any, max_tokens: int) -> StsPairs:
    """Tokenizes STS-B's development set.

    Args:
        folder: folder of the file.
        tokenizer: the shards' tokenizer.
        max_tokens: largest number of tokens of a text, specials included; longer ones are cut at the end.

    Raises:
        StsError: see `read_pairs`.
    """
    pairs = read_pairs(folder)
    texts = [first for _, first, _ in pairs] + [second for _, _, second in pairs]
    ids = tokenizer(texts, truncation=True, max_length=max_tokens, return_attention_mask=False)["input_ids"]
    return StsPairs(ids, [score for score, _, _ in pairs])


@dataclass(frozen=True)
class StsValidator:
    """Scores an encoder on STS-B, shared among the workers.

    Attributes:
        pairs: the pairs.
        layers: layers behind the pooling that are exported.
        comm: the workers.
        device: device of the encoder.
    """

    pairs: StsPairs
    layers: Sequence[Dense]
    comm: Communicator
    device: torch.device

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """Spearman correlation in percent, 0 if all cosines are equal; None if embeddings are not finite."""
        ids = self.pairs.ids
        found = embed_together(encoder, len(ids), self._batch, self.layers, self.comm, self.device)
        if not bool(found.isfinite().all()):
            return None
        first, second = found.chunk(2)
        cosines = F.cosine_similarity(first, second, dim=-1)
        pairs = np.stack([cosines.numpy(), self.pairs.gold], axis=1)
        return {STSB: RowScore(np.arange(len(pairs), dtype=np.uint64), pairs)}

    def _batch(self, some: slice) -> SpanBatch:
        texts = self.pairs.ids[some]
        nothing = torch.empty(0, dtype=torch.int64)
        ids = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        return SpanBatch(ids, torch.tensor([len(text) for text in texts], dtype=torch.int64), nothing, nothing)


@dataclass(frozen=True)
class _Together:
    """Several validators as one."""

    parts: Sequence[Validator]

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """The scores of all parts; None if one has none."""
        found: dict[str, float] = {}
        for part in self.parts:
            scores = part.scores(encoder)
            if scores is None:
                return None
            found |= scores
        return found


def together(parts: Sequence[Validator]) -> Validator | None:
    """One validator with the scores of several; None without any."""
    return None if not parts else parts[0] if len(parts) == 1 else _Together(parts)
