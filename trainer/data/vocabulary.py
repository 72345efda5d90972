"""Ids of a tokenizer for packing and masking."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """Size and special ids of a tokenizer.

    Attributes:
        size: number of ids.
        bos: id before every span, or None.
        eos: id after every span, or None.
        mask: id of the mask token.
        special: every special id; never selected for MLM.
    """

    size: int
    bos: int | None
    eos: int | None
    mask: int
    special: tuple[int, ...]

    @property
    def num_specials(self) -> int:
        """Number of special tokens around a span."""
        return (self.bos is not None) + (self.eos is not None)
