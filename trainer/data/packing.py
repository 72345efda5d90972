"""Special tokens, dropout keys and masks for MLM of packed spans.

Masking is BERT's recipe. Every draw depends on (seed, epoch, document, span, place of the token in the span) only.
Numpy only: a config is read without torch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from declutr.common import seeding
from declutr.common.config import Strict

I64 = NDArray[np.int64]
_SPAN_STRIDE = 1 << 20  # above the number of tokens of any span, so that spans never share draws


@dataclass(frozen=True)
class Vocabulary:
    """Size and special ids of a tokenizer."""

    size: int  # number of ids
    bos: int | None  # id before every span, or None
    eos: int | None  # id after every span, or None
    mask: int  # id of the mask token
    special: tuple[int, ...]  # every special id; never selected for MLM
    prompt: tuple[int, ...] = ()  # ids before the content of every span, after `bos`; never selected either
    query_prompt: tuple[int, ...] | None = None  # the same of a span that is a query; None: `prompt`

    @property
    def num_specials(self) -> int:
        """Most tokens around a span: special ones, and those of a prompt."""
        return (self.bos is not None) + (self.eos is not None) + max(len(self.prompt), len(self.query_prompt or ()))


def dropout_words(
    seed: int,  # seed of the run
    keys: seeding.U64,  # `(S,)` key of each span's document
    epochs: seeding.U64,  # `(S,)` epoch in which it is read
    numbers: I64,  # `(S,)` number of the span, unique among those of its document
) -> NDArray[np.int32]:
    """`(S,)` dropout keys of spans; spans with different arguments drop independently."""
    drawn = seeding.blocks(seed, "dropout", keys, epochs, numbers.astype(np.uint64))
    return np.ascontiguousarray(drawn[:, 0]).view(np.int32)


class MaskingConfig(Strict):
    """Selection and replacement of tokens for MLM."""

    mlm_probability: float = Field(default=0.15, ge=0, le=1)
    """Probability that a token is selected for prediction."""
    mask_replace_prob: float = Field(default=0.8, ge=0, le=1)
    """Probability that a selected token becomes the mask token."""
    random_replace_prob: float = Field(default=0.1, ge=0, le=1)
    """Probability that a selected token becomes a random one; the others stay."""

    @model_validator(mode="after")
    def _add_up(self) -> "MaskingConfig":
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise ValueError(
                f"mask_replace_prob = {self.mask_replace_prob} and random_replace_prob = {self.random_replace_prob} "
                "must add up to at most 1; lower one of them"
            )
        return self


def mask_tokens(
    config: MaskingConfig,  # probabilities of selection and replacement
    seed: int,  # the run's seed
    vocabulary: Vocabulary,  # ids of the tokenizer; random replacements may hit a special token or the token itself
    ids: I64,  # `(t,)` tokens
    key: seeding.U64,  # `(t,)` key of each token's document
    epoch: seeding.U64,  # `(t,)` epoch in which the document is read
    anchor: I64,  # `(t,)` number of the token's span in its document
    place: I64,  # `(t,)` place of the token in its span, below 2**20
) -> tuple[I64, NDArray[np.bool_]]:
    """Masked copy: `(t,)` new ids, and `(t,)` true for the tokens that are selected for prediction."""
    index = (anchor * _SPAN_STRIDE + place).astype(np.uint64)  # the place in the span, not in the batch
    drawn = seeding.blocks(seed, "mlm", key, epoch, index)
    # A word w represents w / 2**32, so w is compared with share * 2**32, which is exact. Few tokens remain.
    candidates = np.flatnonzero(drawn[:, 0] < config.mlm_probability * 2.0**32)
    chosen = candidates[~np.isin(ids[candidates], np.array(vocabulary.special))]
    selected = np.zeros(len(ids), np.bool_)
    selected[chosen] = True
    kind, value = seeding.unit(drawn[chosen, 1]), seeding.unit(drawn[chosen, 2])
    hidden, randomised = kind < config.mask_replace_prob, kind < config.mask_replace_prob + config.random_replace_prob
    masked = ids.copy()
    others = np.where(randomised, (value * vocabulary.size).astype(np.int64), ids[chosen])
    masked[chosen] = np.where(hidden, vocabulary.mask, others)
    return masked, selected


def ranges(sizes: I64) -> I64:
    """0..size-1 for each size, one after the other."""
    return np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
