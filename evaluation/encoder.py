"""Texts to embeddings with a trained encoder: batches by token budget, no padding where the encoder can pack."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from common.storage import read_json
from trainer.batches import SpanBatch
from trainer.model import Encoder, EncoderConfig, max_span_tokens, packs

Pooling = Literal["mean", "cls", "max"]
_POOLING_FILE = "1_Pooling/config.json"


class EncoderError(ValueError):
    """A folder or name that is no encoder this project can load."""


@dataclass(frozen=True)
class TextEncoder:
    """An encoder with its tokenizer.

    Attributes:
        encoder: in evaluation mode.
        tokenizer: of transformers.
        max_tokens: longer texts are cut, specials included.
    """

    encoder: Encoder
    tokenizer: Any
    max_tokens: int

    @property
    def size(self) -> int:
        """Numbers in an embedding."""
        return self.encoder.hidden_size

    def encode(self, texts: Sequence[str], batch_tokens: int = 16384) -> NDArray[np.float32]:
        """Embeddings `(len(texts), size)` in the order of the texts; an empty text is its special tokens alone.

        Args:
            texts: what is embedded; each is cut at `max_tokens`.
            batch_tokens: most tokens in one forward.
        """
        if not texts:
            return np.empty((0, self.size), np.float32)
        ids: list[list[int]] = self.tokenizer(list(texts), truncation=True, max_length=self.max_tokens)["input_ids"]
        order = sorted(range(len(ids)), key=lambda number: len(ids[number]))  # neighbours of one length attend together
        batch = _batch([ids[number] for number in order])
        device = next(self.encoder.parameters()).device
        with torch.inference_mode():
            parts = [self.encoder.embed(piece.to(device)).float().cpu() for piece in batch.microbatches(batch_tokens)]
        embeddings = np.empty((len(ids), self.size), np.float32)
        embeddings[order] = torch.cat(parts).numpy()
        return embeddings


def _batch(ids: list[list[int]]) -> SpanBatch:
    nothing = torch.empty(0, dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in ids])
    return SpanBatch(torch.from_numpy(np.concatenate(ids).astype(np.int64)), lengths, nothing, nothing)


def load_encoder(name: str, pooling: Pooling | None = None, device: str | None = None) -> TextEncoder:
    """Loads an exported folder, a sentence-transformers folder, or any transformers encoder by name or path.

    Args:
        name: folder or name; code that a model brings along is never run.
        pooling: None: what the folder says, else mean.
        device: None: a GPU when there is one.

    Raises:
        EncoderError: it cannot be loaded, or has a pooling that is not one of ours.
    """
    # It would list the MLM head, which an encoder has no use for, as unexpected.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModel.from_pretrained(name, dtype=torch.float32, **_without_pooler(config))
    except (OSError, ValueError) as error:
        raise EncoderError(f"{name} cannot be loaded as an encoder: {error}") from error
    chosen = pooling or _stored_pooling(Path(name)) or "mean"
    encoder = Encoder(EncoderConfig(pretrained=name, pooling=chosen), model, seed=0).eval()
    if not packs(encoder):
        encoder = Encoder(EncoderConfig(pretrained=name, pooling=chosen, layout="padded"), model, seed=0).eval()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    limit = min(max_span_tokens(model), tokenizer.model_max_length)
    return TextEncoder(encoder.to(device), tokenizer, limit)


def _without_pooler(config: Any) -> dict[str, bool]:
    """BERT's and RoBERTa's extra dense layer over the first token is never used here, and often not in the file."""
    return {"add_pooling_layer": False} if config.model_type in ("bert", "roberta", "xlm-roberta", "camembert") else {}


def _stored_pooling(folder: Path) -> Pooling | None:
    """The pooling that a sentence-transformers folder declares, in its old or its new form."""
    path = folder / _POOLING_FILE
    if not path.is_file():
        return None
    settings = read_json(path)
    declared = settings.get("pooling_mode")
    if declared is None:
        flags = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens"}
        declared = "+".join(kind for kind, flag in flags.items() if settings.get(flag))
    for kind in get_args(Pooling):
        if declared == kind:
            return kind  # type: ignore[no-any-return]
    raise EncoderError(f"{path}: pooling {declared!r} is not one of {', '.join(get_args(Pooling))}; name one")
