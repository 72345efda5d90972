"""The encoder: any masked language model of transformers, with packed or padded forward, pooling and projection head.

Legend: T tokens, S spans, H hidden size, D embedding size, K selected tokens.

transformers is imported where it is used: it takes seconds, and a command that continues a run builds no encoder.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common import seeding
from common.config import Strict
from trainer.attention import PACKED, AttentionLayout, register
from trainer.batches import IGNORED, SpanBatch, pad_rows, position_ids
from trainer.dropout import DropoutKeys, key_dropout, token_keys
from trainer.feed import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ProjectionConfig(Strict):
    """The head between pooling and the contrastive loss (DeCLUTR appendix; SimCLR). Dropped at export."""

    kind: Literal["none", "linear", "mlp"] = "none"
    """Two layers, without (linear) or with (mlp) a ReLU between them; none: the pooled embedding itself."""
    size: int = Field(default=128, ge=1)
    """Width of the projected embedding and of the hidden layer."""


class EncoderConfig(Strict):
    """Which encoder is trained and how spans become embeddings."""

    pretrained: str | None = None
    """Name or folder of a masked language model of transformers."""
    scratch: dict[str, Any] | None = None
    """Instead: a transformers config (with `model_type`) whose weights are drawn from the run's seed. Vocabulary size
    and special ids come from the shards' tokenizer."""
    trust_remote_code: bool = False
    """Run code that a pretrained model brings along. Only for models you trust."""
    pooling: Literal["mean", "cls", "max"] = "mean"
    """Span embedding: mean or maximum over all its tokens (specials included, as released), or its first token."""
    projection: ProjectionConfig = ProjectionConfig()
    layout: Literal["packed", "padded"] = "packed"
    """packed: no padding, attention within spans only. padded: the reference, for encoders that cannot pack."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Replaces every dropout probability of the model; None keeps the model's own."""
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Replaces the probability of dropping attention weights. Above 0, attention weights are written out one by one,
    which is slow and takes memory: fused kernels know no dropout that could be repeated in another microbatch."""

    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward and compute the rest again: less memory, a third more time."""
    compile: bool = False
    """Compile the encoder with torch.compile, once for all lengths. Worth it on a GPU."""

    @model_validator(mode="after")
    def _one_source(self) -> "EncoderConfig":
        if (self.pretrained is None) == (self.scratch is None):
            raise ValueError(
                "give exactly one of `pretrained` (a name or folder) and `scratch` (a transformers config)"
            )
        if self.scratch is not None and "model_type" not in self.scratch:
            raise ValueError("scratch needs `model_type`, for example roberta, bert or modernbert")
        return self


_LOGITS = 2**26  # most logits that are held at once, a quarter of a GiB

_DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "embedding_dropout", "mlp_dropout",
    "hidden_dropout", "activation_dropout", "dropout",
)  # fmt: skip
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")


def load_hf_config(config: EncoderConfig, vocabulary_size: int, ids: dict[str, int | None]) -> Any:
    """The transformers config of the encoder, without its weights.

    Args:
        config: the encoder.
        vocabulary_size: ids of the tokenizer; used from scratch only.
        ids: `pad_token_id`, `bos_token_id`, ... of the tokenizer; used from scratch only.
    """
    from transformers import AutoConfig

    if config.pretrained is not None:
        hf = AutoConfig.from_pretrained(config.pretrained, trust_remote_code=config.trust_remote_code)
    else:
        assert config.scratch is not None
        given = dict(config.scratch)
        hf = AutoConfig.for_model(given.pop("model_type"), **{"vocab_size": vocabulary_size, **ids, **given})
    if config.dropout is not None:
        for name in _DROPOUTS:
            if hasattr(hf, name):
                setattr(hf, name, config.dropout)
    if config.attention_dropout is not None:
        for name in _ATTENTION_DROPOUTS:
            if hasattr(hf, name):
                setattr(hf, name, config.attention_dropout)
    return hf


def build_model(config: EncoderConfig, hf: Any, seed: int) -> "PreTrainedModel":
    """The masked language model in float32: pretrained weights, or weights drawn from the seed."""
    from transformers import AutoModelForMaskedLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.torch_seed(seed, "weights"))
        if config.pretrained is None:
            model = AutoModelForMaskedLM.from_config(hf, dtype=torch.float32)
        else:
            model = AutoModelForMaskedLM.from_pretrained(
                config.pretrained, config=hf, dtype=torch.float32, trust_remote_code=config.trust_remote_code
            )
    mlm_head(model)  # an unknown family stops here, not in the first step
    return model


def padding_index(model: "PreTrainedModel") -> int | None:
    """pad_token_id where positions skip it and count from the next (RoBERTa's family); None where they count from 0."""
    embeddings = getattr(model.base_model, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(model.config.pad_token_id)
    return None


def max_span_tokens(model: "PreTrainedModel") -> int:
    """Longest span the positions allow, specials included."""
    skipped = padding_index(model)
    return int(model.config.max_position_embeddings) - (0 if skipped is None else skipped + 1)


def mlm_head(model: "PreTrainedModel") -> Callable[[Tensor], Tensor]:
    """The part of the model that turns `(K, H)` hidden states into `(K, vocabulary)` logits.

    Raises:
        ValueError: an encoder family whose head is not known here.
    """
    for name in ("lm_head", "cls"):  # RoBERTa, XLM-R, CamemBERT; BERT, ELECTRA-like
        if hasattr(model, name):
            head: Callable[[Tensor], Tensor] = getattr(model, name)
            return head
    if hasattr(model, "head") and hasattr(model, "decoder"):  # ModernBERT
        return lambda hidden: model.decoder(model.head(hidden))
    raise ValueError(
        f"encoder: {type(model).__name__} has no known MLM head; "
        "tested families: RoBERTa, DistilRoBERTa, BERT, ModernBERT"
    )


class Encoder(nn.Module):
    """A masked language model with pooling and projection, over batches of spans.

    Args:
        config: pooling, projection, layout.
        model: the masked language model.
        seed: the run's seed, for the projection's weights.
    """

    def __init__(self, config: EncoderConfig, model: "PreTrainedModel", seed: int) -> None:
        super().__init__()
        self.model = model
        self.sharded = False  # by trainer/sharding.py
        self.hidden_size = int(model.config.hidden_size)
        self.keys = DropoutKeys()
        key_dropout(model, self.keys, max(self.hidden_size, getattr(model.config, "intermediate_size", 0)))
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.compile:
            model.base_model.compile(dynamic=True)
        self.set_layout(config)
        self.padding_index = padding_index(model)
        self.projection: nn.Module = nn.Identity()
        self.embedding_size = self.hidden_size
        if config.projection.kind != "none":
            size = self.embedding_size = config.projection.size
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seeding.torch_seed(seed, "projection"))
                between = nn.ReLU() if config.projection.kind == "mlp" else nn.Identity()
                self.projection = nn.Sequential(nn.Linear(self.hidden_size, size), between, nn.Linear(size, size))

    def set_layout(self, config: EncoderConfig) -> None:
        """Takes over a configuration that differs in its layout alone."""
        self.config = config
        register()
        self.model.set_attn_implementation(PACKED if config.layout == "packed" else "sdpa")

    def hidden(self, batch: SpanBatch) -> Tensor:
        """Last hidden states of the spans' tokens, `(T, H)`, in the batch's order."""
        if batch.num_tokens == 0:  # a rank without documents
            empty: Tensor = next(self.model.parameters()).new_zeros(0, self.hidden_size)
            return empty
        tokens = token_keys(batch.keys, batch.lengths) if batch.keys is not None else None
        if self.config.layout == "padded":
            ids, mask = pad_rows(batch, int(self.model.config.pad_token_id or 0))
            padded = None if tokens is None else tokens.new_zeros(mask.shape).masked_scatter(mask, tokens)
            self.keys.tokens = padded
            rows: Tensor = self.model.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            return rows[mask]
        positions = position_ids(batch, self.padding_index)
        kinds = {"token_type_ids": torch.zeros_like(positions)} if self._has_token_types() else {}
        self.keys.tokens = None if tokens is None else tokens[None]
        row: Tensor = self.model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=positions,
            packed_layout=AttentionLayout(batch.lengths, positions.device, tokens),
            **kinds,
        ).last_hidden_state
        return row[0]

    def token_places(self, batch: SpanBatch) -> int:
        """Token places that a forward computes: T when packed, padding included otherwise."""
        if self.config.layout == "packed" or batch.num_spans == 0:
            return batch.num_tokens
        return batch.num_spans * int(batch.lengths.max())

    def _has_token_types(self) -> bool:
        return getattr(self.model.config, "type_vocab_size", 0) > 0

    def pool(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Span embeddings before projection, `(S, H)`, in at least float32."""
        hidden = _at_least_float32(hidden)
        if self.config.pooling == "cls":
            return hidden[(lengths.cumsum(0) - lengths).to(hidden.device)]
        pooled: Tensor = torch.segment_reduce(
            hidden, self.config.pooling, lengths=lengths.to(hidden.device), axis=0, unsafe=True
        )
        return pooled

    def embed(self, batch: SpanBatch) -> Tensor:
        """Pooled embeddings of the spans, `(S, H)`: what the exported encoder gives."""
        if self.sharded:
            return self._pooled(batch.with_blank())[:-1]
        return self._pooled(batch)

    def forward(self, batch: SpanBatch) -> tuple[Tensor, Tensor]:
        """Projected span embeddings `(S, D)` and the MLM loss summed over the batch's K selected tokens."""
        if not self.sharded:
            return self._encode(batch)
        embeddings, mlm_sum = self._encode(batch.with_blank())
        return embeddings[:-1].clone(), mlm_sum  # FSDP's hooks want no views

    def _pooled(self, batch: SpanBatch) -> Tensor:
        return self.pool(self.hidden(batch), batch.lengths)

    def _encode(self, batch: SpanBatch) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(batch)
        embeddings = _at_least_float32(self.projection(self.pool(hidden, batch.lengths)))
        if len(batch.selected) == 0:
            return embeddings, embeddings.new_zeros(())
        rows = max(1, _LOGITS // int(self.model.config.vocab_size))
        losses = [
            self._predict(hidden[places], labels, keep=len(batch.selected) <= rows)
            for places, labels in zip(batch.selected.split(rows), batch.labels.split(rows), strict=True)
        ]
        return embeddings, torch.stack(losses).sum()

    def _predict(self, hidden: Tensor, labels: Tensor, keep: bool) -> Tensor:
        """MLM loss of selected tokens, summed; unless kept, their logits are computed again in the backward."""

        def loss(hidden: Tensor) -> Tensor:
            logits = _at_least_float32(mlm_head(self.model)(hidden))
            return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)

        if keep or not torch.is_grad_enabled():
            return loss(hidden)
        again: Tensor = checkpoint(loss, hidden, use_reentrant=False)
        return again


def packs(encoder: Encoder) -> bool:
    """Does this encoder give the same embeddings packed as padded? Tried on a few made-up spans.

    Families that bypass transformers' attention interface, or bring positions of their own, do not.
    """
    lengths = torch.tensor([3, 7, 5, 7])
    special = {encoder.model.config.pad_token_id, None}
    allowed = [number for number in range(min(64, encoder.model.config.vocab_size)) if number not in special]
    ids = torch.tensor([allowed[place % len(allowed)] for place in range(int(lengths.sum()))])
    device = next(encoder.parameters()).device
    nothing = torch.empty(0, dtype=torch.int64)
    batch = SpanBatch(ids, lengths, nothing, nothing).to(device)
    config, was_training = encoder.config, encoder.training
    encoder.eval()
    found = []
    with torch.inference_mode():
        for layout in ("padded", "packed"):
            encoder.set_layout(config.model_copy(update={"layout": layout}))
            try:
                found.append(encoder.embed(batch))
            except (TypeError, ValueError):  # a forward that does not take packed_layout, or attention that lacks it
                return False
            finally:
                encoder.set_layout(config)
                encoder.train(was_training)
    padded, packed = found
    return torch.allclose(padded, packed, rtol=1e-3, atol=1e-4)


def _at_least_float32(values: Tensor) -> Tensor:
    """Autocast's half precision ends here: losses are computed in float32."""
    return values if values.dtype == torch.float64 else values.float()


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Ids the feed needs, from a transformers tokenizer.

    Raises:
        ValueError: the tokenizer has no mask token.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no mask token, which MLM needs")
    bos = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
    eos = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    return Vocabulary(len(tokenizer), bos, eos, tokenizer.mask_token_id, tuple(sorted(tokenizer.all_special_ids)))
