"""Encoders of known sizes with weights drawn from a seed, so that nothing is downloaded."""

from typing import Any

from transformers import PreTrainedModel

from trainer.data.vocabulary import Vocabulary
from trainer.model.encoder import Encoder
from trainer.model.language_model import build_model, load_hf_config
from trainer.model.settings import EncoderConfig
from trainer.objectives.declutr.feed import SpanFeed
from trainer.objectives.masking import MaskingConfig
from trainer.objectives.span_settings import SpanConfig

_POSITIONS = 514  # RoBERTa's first two are never used
_ROBERTA = {"model_type": "roberta", "max_position_embeddings": _POSITIONS, "type_vocab_size": 1}
_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_ROBERTA,
        "vocab_size": 1000,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    "demo": {
        **_ROBERTA,
        "vocab_size": 8000,
        "hidden_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 768,
    },
    "distilroberta": {**_ROBERTA, **_BASE, "vocab_size": 50265, "num_hidden_layers": 6},
    "roberta-base": {**_ROBERTA, **_BASE, "vocab_size": 50265, "num_hidden_layers": 12},
}
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}


def vocabulary(size: str) -> Vocabulary:
    """RoBERTa's special ids, with the mask as the last id."""
    ids = int(SIZES[size]["vocab_size"])
    return Vocabulary(size=ids, bos=0, eos=2, mask=ids - 1, special=(0, 1, 2, 3, ids - 1))


def encoder(size: str, dropout: float, seed: int) -> Encoder:
    """Build the trainer's encoder: packed, in training mode, float32, on the CPU."""
    config = EncoderConfig(scratch=SIZES[size], dropout=dropout)
    return Encoder(config, _model(size, config, seed), seed).train()


def padded_model(size: str, dropout: float, seed: int) -> PreTrainedModel:
    """Build transformers' model with the same weights, its own dropout layers, and torch's fused attention."""
    model = _model(size, EncoderConfig(scratch=SIZES[size], dropout=dropout), seed)
    model.set_attn_implementation("sdpa")
    model.train()
    return model


def _model(size: str, config: EncoderConfig, seed: int) -> PreTrainedModel:
    return build_model(config, load_hf_config(config, int(SIZES[size]["vocab_size"]), dict(_IDS)), seed)


def feed(size: str, spans: SpanConfig, masking: MaskingConfig | None, seed: int) -> SpanFeed:
    """Feed for the benchmarks' documents; a span leaves room for its two special tokens."""
    return SpanFeed(
        spans=spans,
        masking=masking,
        unmasked_anchors=False,
        include_positives=True,
        max_content=_POSITIONS - 4,
        vocabulary=vocabulary(size),
        seed=seed,
    )
