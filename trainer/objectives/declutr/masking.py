"""Masked language modelling (BERT's recipe, as DeCLUTR uses it): selection and replacement of anchor tokens.

Every draw depends on (seed, epoch, document, anchor, place of the token in the anchor) only. Numpy only.
"""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from common import seeding
from common.config import Strict

_ANCHOR_STRIDE = 1 << 20  # above the number of tokens of any anchor, so that anchors never share draws


class MaskingConfig(Strict):
    """Selection and replacement of tokens for MLM."""

    select_share: float = Field(default=0.15, ge=0, le=1)
    """Probability that a token (never a special one) is selected and must be predicted."""
    mask_share: float = Field(default=0.8, ge=0, le=1)
    """Share of the selected tokens to replace by the mask token."""
    random_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the selected tokens to replace by a token drawn uniformly from the whole vocabulary. The other selected
    tokens stay unchanged."""


def mask_tokens(
    config: MaskingConfig,
    seed: int,
    ids: NDArray[np.int64],
    key: seeding.U64,
    epoch: seeding.U64,
    anchor: NDArray[np.int64],
    place: NDArray[np.int64],
    vocab_size: int,
    mask_id: int,
    special_ids: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Masked copy of the tokens, and the selection of tokens to be predicted.

    Args:
        config: shares of selected and replaced tokens.
        seed: the run's seed.
        ids: `(t,)` tokens.
        key: `(t,)` key of each token's document.
        epoch: `(t,)` epoch in which the document is read.
        anchor: `(t,)` number of the anchor in its document.
        place: `(t,)` place of the token in its anchor, below 2**20.
        vocab_size: random replacements are below this; they may hit a special token or the token itself.
        mask_id: id of the mask token.
        special_ids: ids that are never selected.

    Returns:
        `(t,)` new ids, and `(t,)` true for selected tokens.
    """
    index = (anchor * _ANCHOR_STRIDE + place).astype(np.uint64)
    drawn = seeding.blocks(seed, "mlm", key, epoch, index)
    # A word w represents w / 2**32, so w is compared with share * 2**32, which is exact. Few tokens remain.
    candidates = np.flatnonzero(drawn[:, 0] < config.select_share * 2.0**32)
    chosen = candidates[~np.isin(ids[candidates], special_ids)]
    selected = np.zeros(len(ids), np.bool_)
    selected[chosen] = True
    kind, value = seeding.unit(drawn[chosen, 1]), seeding.unit(drawn[chosen, 2])
    hidden, randomised = kind < config.mask_share, kind < config.mask_share + config.random_share
    masked = ids.copy()
    masked[chosen] = np.where(hidden, mask_id, np.where(randomised, (value * vocab_size).astype(np.int64), ids[chosen]))
    return masked, selected
