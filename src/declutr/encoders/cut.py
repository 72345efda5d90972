"""Encoders cut to a size: the first numbers of each embedding, as Matryoshka training makes them useful."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from declutr.common.errors import EncoderError
from declutr.common.storage import hash_json
from declutr.encoders.protocol import SentenceEncoder, vectors_fingerprint


@dataclass(frozen=True)
class CutEncoder:
    """The first `size` numbers of an encoder's embeddings, as they are; a cosine needs no new normalisation."""

    whole: SentenceEncoder
    size: int

    @property
    def name(self) -> str:
        """Name of the encoder with the size behind it."""
        return f"{self.whole.name} [{self.size}]"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the embeddings, the precision included."""
        return hash_json([vectors_fingerprint(self.whole), self.size])

    @property
    def pretrained(self) -> str:
        """Name of the encoder from which the whole one was trained, "" if unknown."""
        return getattr(self.whole, "pretrained", "")

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings `(len(texts), size)`."""
        return self.whole.encode(texts)[:, : self.size]


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes of an option, ascending: whole numbers from 1, separated by commas; none for `none`.

    Raises:
        EncoderError: one is something else, or occurs twice.
    """
    if text.strip() == "none":
        return ()
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not (word.isascii() and word.isdecimal() and int(word))]:
        raise EncoderError(f"--sizes {text}: {', '.join(map(repr, wrong))} must be whole numbers from 1, or `none`")
    sizes = sorted(map(int, words))
    if len(set(sizes)) < len(sizes):
        raise EncoderError(f"--sizes {text}: a size is listed twice; list each once")
    return tuple(sizes)


def sizes_of(encoder: SentenceEncoder, sizes: tuple[int, ...] | None) -> tuple[int, ...]:
    """The smaller sizes at which an encoder is scored, ascending.

    Args:
        encoder: the encoder.
        sizes: the user's sizes; None: those that `matryoshka_dimensions` of its config.json declares, if any.

    Raises:
        EncoderError: an embedding is not larger than a wanted size, or the declaration is no list of sizes.
    """
    if sizes is not None:
        if large := [size for size in sizes if size >= encoder.size]:
            raise EncoderError(
                f"{encoder.name}: --sizes {', '.join(map(str, large))}: its embedding has {encoder.size} numbers, "
                "which are scored anyway; name smaller sizes"
            )
        return sizes
    model = getattr(getattr(encoder, "encoder", None), "model", None)
    declared: Any = getattr(getattr(model, "config", None), "matryoshka_dimensions", None)
    if declared is None:
        return ()
    if not isinstance(declared, list) or not all(type(size) is int and 1 <= size <= encoder.size for size in declared):
        raise EncoderError(
            f"{encoder.name}: its config.json has matryoshka_dimensions = {str(declared)[:60]}; they must be whole "
            f"numbers from 1 to {encoder.size}; correct it, or give --sizes"
        )
    return tuple(sorted({size for size in declared if size < encoder.size}))


def with_cuts(encoder: SentenceEncoder, sizes: Sequence[int]) -> list[SentenceEncoder]:
    """The encoder cut to each size, and then the whole one."""
    return [*(CutEncoder(encoder, size) for size in sizes), encoder]
