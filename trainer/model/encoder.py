"""The encoder: a masked language model with packed or padded forward, pooling and projection head.

Legend: T tokens, S spans, H hidden size, D embedding size, K selected tokens.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from declutr.common import seeding
from declutr.common.console.logs import get_logger
from declutr.trainer.data.batches import (
    IGNORED,
    AnyBatch,
    PatchBatch,
    SpanBatch,
    as_rows,
    padding_mask,
    position_ids,
    row_places,
)
from declutr.trainer.data.packedbatch import TokenTable
from declutr.trainer.model.attention import (
    PACKED,
    PADDED,
    AttentionLayout,
    Kernels,
    attend,
    fitting_kernels,
    prepare_modules,
    register,
)
from declutr.trainer.model.behind import Dense, Step
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.dropout import DropoutKeys, key_dropout
from declutr.trainer.model.frontend import EmbeddingSwitch, Frontend
from declutr.trainer.model.half import HalfWeights
from declutr.trainer.model.language_model import (
    ATTENTION_DROPOUTS,
    FAMILIES,
    INDUCTOR,
    LoadReport,
    compile_layers,
    compiler_problem,
    pad_vocabulary,
    padding_index,
    silence,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOGITS = 2**26  # largest number of logits held at once on a CPU, 256 MiB in float32
_GPU_LOGITS = 2**28  # on a GPU, where a second computation costs more than memory: 512 MiB in half precision


class Encoder(nn.Module):
    """A masked language model with pooling and projection, over batches of spans."""

    def __init__(
        self,
        config: EncoderConfig,  # settings of pooling, projection and layout
        model: "PreTrainedModel",  # the masked language model
        seed: int,  # the run's seed, for the projection's weights
        load_report: LoadReport | None = None,  # weights that only the model or only its files have
        behind: Sequence[Step] = (),  # steps between pooling and projection, which belong to the exported encoder
    ) -> None:
        super().__init__()
        self.model = model
        self.load_report = load_report or LoadReport()
        self.sharded = False  # set by trainer/parallel/communicator.py
        self.prompts: dict[str, str] = {}  # of its export, by name; set by trainer/build.py
        self.experimental = False  # set by trainer/build.py, from the setting of that name
        self._weights: HalfWeights | None = None
        self._kernels: dict[tuple[torch.device, bool], Kernels | None] = {}
        self._switch: EmbeddingSwitch | None = None
        self.hidden_size = int(model.config.hidden_size)
        self.keys = DropoutKeys()
        prepare_modules(model, self.keys)
        key_dropout(model, self.keys, max(self.hidden_size, getattr(model.config, "intermediate_size", 0)))
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._loss: Callable[..., Tensor] = _mlm_loss
        self._compiled = config.compile  # None until a forward on a GPU, if kernels can be generated for it
        if config.compile:
            self._compile_layers()
        self.set_layout(config)
        self.padding_index = padding_index(model)
        self.behind = nn.Sequential(*behind)
        widths = [step.linear.out_features for step in behind if isinstance(step, Dense)]
        self.output_size = widths[-1] if widths else self.hidden_size  # of the exported encoder's embeddings
        self.projection: nn.Module = nn.Identity()
        self.embedding_size = self.output_size
        if config.projection.kind != "none":
            size = self.embedding_size = config.projection.size
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seeding.torch_seed(seed, "projection"))
                between = nn.ReLU() if config.projection.kind == "mlp" else nn.Identity()
                self.projection = nn.Sequential(nn.Linear(self.output_size, size), between, nn.Linear(size, size))

    def set_layout(self, config: EncoderConfig) -> None:
        """Replaces the configuration by one that differs only in its layout."""
        self.config = config
        register()
        fused = getattr(self.model, "_supports_sdpa", True)
        with silence():  # transformers warns that families without its attention interface keep their attention
            self.model.set_attn_implementation(PACKED if config.layout == "packed" else (PADDED if fused else "eager"))

    def hidden(
        self,
        batch: AnyBatch,  # spans, or clips of patches
        frontend: Frontend | None = None,  # computes the hidden states of patches, which the encoder's layers then read
    ) -> Tensor:
        """Last hidden states of the spans' tokens, `(T, H)`, in the batch's order."""
        if batch.num_tokens == 0:  # a rank without documents
            return next(self.model.parameters()).new_zeros(0, self.hidden_size)
        if frontend is None:
            assert isinstance(batch, SpanBatch)
            return self._layers(batch, "input_ids", batch.input_ids)
        assert isinstance(batch, PatchBatch)
        self._switch = self._switch or EmbeddingSwitch(self.model)
        states = frontend(batch)
        padded = self.config.layout == "padded"
        with self._switch.reading(as_rows(states, batch) if padded else states[None]):
            return self._layers(batch, "inputs_embeds", states)

    def _layers(self, batch: AnyBatch, name: str, values: Tensor) -> Tensor:
        """Last hidden states; `values` `(T, ...)` are passed to the model as `name`."""
        table, padded = batch.table, self.config.layout == "padded"
        inputs: dict[str, Any]
        if padded:
            self._set_keys(table, lambda tensor: as_rows(tensor, batch))
            filling = int(self.model.config.pad_token_id or 0) if name == "input_ids" else 0
            inputs = {name: as_rows(values, batch, filling), "attention_mask": padding_mask(batch).long()}
        else:
            positions = position_ids(batch, self.padding_index)
            # One kind for all tokens: on a GPU the gradient of T lookups of one row is added token by token.
            kind = torch.zeros_like(positions[:, :1] if positions.is_cuda else positions)
            kinds = {"token_type_ids": kind} if getattr(self.model.config, "type_vocab_size", 0) > 0 else {}
            self._set_keys(table, lambda tensor: tensor[None])
            drops = self.training and (table.attention is not None or drops_attention(self.model.config))
            kernels, device = self.kernels(positions.device, drops), positions.device
            layout = AttentionLayout(batch.lengths, device, table.keys, table.attention, kernels, table.bounds)
            inputs = {name: values[None], "position_ids": positions, "packed_layout": layout, **kinds}
        with self._forward_in(batch.device):
            states: Tensor = self.model.base_model(**inputs).last_hidden_state
        return states.flatten(0, 1)[row_places(batch)] if padded else states.squeeze(0)

    def _set_keys(self, table: TokenTable, arrange: Callable[[Tensor], Tensor]) -> None:
        """Gives the dropout layers the keys and rates of a batch's tokens, in the shape of its hidden states."""
        self.keys.tokens = None if table.keys is None else arrange(table.keys)
        self.keys.hidden = None if table.hidden is None else table.hidden.rearranged(arrange)
        self.keys.attention = None if table.attention is None else table.attention.rearranged(arrange)

    def kernels(
        self,
        device: torch.device,  # device of the batches
        drops: bool,  # attention weights are dropped
    ) -> Kernels | None:
        """The attention kernels on a device; None: groups of spans of similar length attend together."""
        if (device, drops) not in self._kernels:
            self._kernels[device, drops] = fitting_kernels(self.model, device, drops, self.experimental)
        return self._kernels[device, drops]

    def token_places(self, batch: AnyBatch) -> int:
        """Token places that a forward computes: T when packed, padding included otherwise."""
        if self.config.layout == "packed" or batch.num_spans == 0:
            return batch.num_tokens
        return batch.num_spans * batch.longest

    def pool(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Span embeddings before projection, `(S, H)`, in at least float32."""
        hidden, pooling = _at_least_float32(hidden), self.config.pooling
        first, lengths = ((lengths.cumsum(0) - lengths).to(hidden.device), lengths.to(hidden.device))
        if pooling == "cls":
            return hidden[first]
        if pooling == "mean_without_cls":  # 0 for the blank span of sharded layers, which has no other token
            sums: Tensor = torch.segment_reduce(
                hidden.index_fill(0, first, 0), "sum", lengths=lengths, axis=0, unsafe=True
            )
            return sums / (lengths - 1).clamp_min(1)[:, None]
        return torch.segment_reduce(hidden, pooling, lengths=lengths, axis=0, unsafe=True)

    def embed(self, batch: AnyBatch, frontend: Frontend | None = None) -> Tensor:
        """Embeddings of spans or of a frontend's clips, `(S, output_size)`, as the exported encoder computes them."""
        if self.sharded:
            batch = batch.with_blank()
        pooled: Tensor = self.behind(self.pool(self.hidden(batch, frontend), batch.table.lengths))
        return pooled[:-1] if self.sharded else pooled

    def forward(self, batch: AnyBatch, frontend: Frontend | None = None) -> tuple[Tensor, Tensor]:
        """Projected span embeddings `(S, D)` and the MLM loss summed over the batch's K selected tokens."""
        if self.sharded:
            batch = batch.with_blank()
        hidden = self.hidden(batch, frontend)
        embeddings = _at_least_float32(self.projection(self.behind(self.pool(hidden, batch.table.lengths))))
        mlm_sum = embeddings.new_zeros(())
        if len(batch.selected):
            max_logits = _GPU_LOGITS if hidden.is_cuda else _LOGITS
            rows = max(1, max_logits // int(self.model.config.vocab_size))
            losses = [
                self._predict(hidden[places], labels, keep=len(batch.selected) <= rows)
                for places, labels in zip(batch.selected.split(rows), batch.labels.split(rows), strict=True)
            ]
            mlm_sum = torch.stack(losses).sum()
        # FSDP's hooks do not accept views
        return (embeddings[:-1].clone() if self.sharded else embeddings), mlm_sum

    def _predict(self, hidden: Tensor, labels: Tensor, keep: bool) -> Tensor:
        """MLM loss of selected tokens, summed; without `keep`, the backward computes their logits again."""
        with self._forward_in(hidden.device):
            if keep or not torch.is_grad_enabled():
                return self._loss(self.model, hidden, labels)
            return checkpoint(self._loss, self.model, hidden, labels, use_reentrant=False)

    def _forward_in(self, device: torch.device) -> AbstractContextManager[None]:
        """The context of a forward on a device: compiled layers and losses are for training alone.

        A validation has too few forwards to be worth another graph. Layers that gather their parameters are compiled
        only by the setting.
        """
        if self._compiled is None and device.type == "cuda" and not self.sharded:
            problem = compiler_problem()
            self._compiled = problem is None
            if problem:
                get_logger().warning("the encoder is not compiled, so steps are slower: %s", problem)
            else:
                self._compile_layers()
        if device.type == "cuda" and self.experimental and not self.sharded and torch.is_autocast_enabled("cuda"):
            self.halve(torch.get_autocast_dtype("cuda"))
        if self.training or not self._compiled:
            return nullcontext()
        return torch.compiler.set_stance("force_eager")

    def halve(self, dtype: torch.dtype) -> None:
        """Gives the layers copies of their weights in half precision, or lets the copies follow the weights."""
        if self._weights is None:
            own = any(kernels is not None and kernels.attend is not attend for kernels in self._kernels.values())
            body, packs = self.model.base_model, own and self.config.layout == "packed"
            self._weights = HalfWeights(body, self.model.config.model_type, dtype, packs)
        self._weights.follow()

    def _compile_layers(self) -> None:
        """Compiles the layers and the loss of the head once for all lengths."""
        compile_layers(self.model.base_model)
        pad_vocabulary(self.model.get_output_embeddings())
        self._loss = torch.compile(_mlm_loss, dynamic=True, options=INDUCTOR)


def _mlm_loss(model: "PreTrainedModel", hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(_at_least_float32(mlm_head(model)(hidden)), labels, reduction="sum", ignore_index=IGNORED)


def _at_least_float32(values: Tensor) -> Tensor:
    """Values in float32 instead of autocast's half precision, for pooling and losses; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def drops_attention(hf: Any) -> bool:
    """True if the encoder's own configuration drops attention weights."""
    return any(getattr(hf, name, 0) > 0 for name in ATTENTION_DROPOUTS)


def mlm_head(model: "PreTrainedModel") -> Callable[[Tensor], Tensor]:
    """The part of the model that maps `(K, H)` hidden states to `(K, vocabulary)` logits."""
    for name in ("lm_head", "cls", "predictions"):  # RoBERTa, MPNet, Longformer; BERT, DeBERTa; ALBERT
        if hasattr(model, name):
            return getattr(model, name)
    if hasattr(model, "head") and hasattr(model, "decoder"):  # ModernBERT
        return lambda hidden: model.decoder(model.head(hidden))
    if hasattr(model, "generator_predictions"):  # ELECTRA
        return lambda hidden: model.generator_lm_head(model.generator_predictions(hidden))
    if hasattr(model, "vocab_projector"):  # DistilBERT
        return lambda hidden: model.vocab_projector(
            model.vocab_layer_norm(model.activation(model.vocab_transform(hidden)))
        )
    raise ValueError(
        f"{type(model).__name__} has no known MLM head; train without MLM, or use one of {', '.join(FAMILIES)}"
    )
