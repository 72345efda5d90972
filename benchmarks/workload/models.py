"""Encoders of known sizes with weights drawn from a seed, so that nothing is downloaded."""

from typing import Any, Literal

from transformers import PreTrainedModel

from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.language_model import load_hf_config, load_model

POSITIONS = 514  # RoBERTa's first two are never used


def _roberta(vocab_size: int, hidden_size: int, num_layers: int, num_heads: int, feed_forward: int) -> dict[str, Any]:
    return {
        "model_type": "roberta",
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 1,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": feed_forward,
    }


SIZES = {
    "tiny": _roberta(1000, 32, 2, 2, 64),
    "demo": _roberta(8000, 192, 3, 6, 768),
    "distilroberta": _roberta(50265, 768, 6, 12, 3072),
    "roberta-base": _roberta(50265, 768, 12, 12, 3072),
}
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}


def vocabulary(size: str) -> Vocabulary:
    """RoBERTa's special ids, with the mask as the last id."""
    ids = int(SIZES[size]["vocab_size"])
    return Vocabulary(size=ids, bos=0, eos=2, mask=ids - 1, special=(0, 1, 2, 3, ids - 1))


def encoder(
    size: str,
    dropout: float,
    seed: int,
    attention_dropout: float | None = None,
    pooling: Literal["mean", "cls"] = "mean",
    compiled: bool | None = False,
) -> Encoder:
    """Build the trainer's encoder: packed, in training mode, float32, on the CPU."""
    config = EncoderConfig(
        from_config=SIZES[size],
        dropout=dropout,
        attention_dropout=attention_dropout,
        pooling=pooling,
        compile=compiled,
    )
    return Encoder(config, _model(size, config, seed), seed).train()


def padded_model(size: str, dropout: float, seed: int, attention_dropout: float | None = None) -> PreTrainedModel:
    """Build transformers' model with the same weights, its own dropout layers, and torch's fused attention."""
    config = EncoderConfig(from_config=SIZES[size], dropout=dropout, attention_dropout=attention_dropout)
    model = _model(size, config, seed)
    model.set_attn_implementation("sdpa")
    model.train()
    return model


def _model(size: str, config: EncoderConfig, seed: int) -> PreTrainedModel:
    return load_model(config, load_hf_config(config, int(SIZES[size]["vocab_size"]), dict(_IDS)), seed)[0]
