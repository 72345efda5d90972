"""Attention over packed spans: one row of tokens, in which no span sees another.

It is known to transformers' own attention interface, so that encoder families work unchanged. Linear layers see
every real token once and no padding; only inside attention are spans of similar length brought together.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.dropout import AttentionDropout

PACKED = "declutr_packed"
# A group of spans is one attention call, padded to its longest span. Merging saves calls and wastes multiplications;
# spans join a group while they are at least this share of its longest, or while the group's scores stay tiny.
_MIN_FILL = 0.75
_SMALL_TOKENS = 96


@dataclass(frozen=True)
class AttentionGroup:
    """Spans that attend in one call.

    Attributes:
        tokens: `(spans, longest)` positions in the packed row; places beyond a span's end repeat its first token.
        valid: `(spans, longest)` True where there is a token; None when all spans have the same length.
    """

    tokens: Tensor
    valid: Tensor | None


class AttentionLayout:
    """Where spans begin and end in a packed row; what a kernel needs of it is made when it is first asked for.

    Args:
        lengths: `(S,)` tokens of each span, in the order in which they are packed; on the CPU.
        device: of the row.
        token_keys: `(T,)` keys of the tokens, for attention dropout; None: nothing is dropped.
    """

    def __init__(self, lengths: Tensor, device: torch.device, token_keys: Tensor | None = None) -> None:
        self.lengths = lengths
        self.device = device
        self.token_keys = token_keys

    @cached_property
    def bounds(self) -> Tensor:
        """`(S + 1,)` int32 places where spans begin, and the end of the last."""
        bounds = torch.zeros(len(self.lengths) + 1, dtype=torch.int32)
        bounds[1:] = self.lengths.cumsum(0)
        return bounds.to(self.device, non_blocking=True)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest span."""
        return int(self.lengths.max())

    @cached_property
    def is_table(self) -> bool:
        """Whether all spans have one length: the row is their table as it stands, and nothing need be moved."""
        return bool((self.lengths == self.lengths[0]).all())

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """Groups of spans of similar length that cover every token once."""
        return [
            AttentionGroup(tokens.to(self.device), valid.to(self.device) if ragged else None)
            for tokens, valid, ragged in self._groups
        ]

    @cached_property
    def order(self) -> Tensor:
        """`(T,)` for each packed token its place in the concatenation of the groups' valid tokens."""
        return torch.argsort(torch.cat([tokens[valid] for tokens, valid, _ in self._groups])).to(self.device)

    @cached_property
    def _groups(self) -> list[tuple[Tensor, Tensor, bool]]:
        """Tokens, which of them are valid, and whether some are not, of each group; on the CPU."""
        starts = (self.lengths.cumsum(0) - self.lengths).tolist()
        sizes = self.lengths.tolist()
        members: list[list[int]] = []
        for span in sorted(range(len(sizes)), key=lambda span: -sizes[span]):
            longest = sizes[members[-1][0]] if members else 0
            if members and (sizes[span] >= _MIN_FILL * longest or longest <= _SMALL_TOKENS):
                members[-1].append(span)
            else:
                members.append([span])
        groups = []
        for group in members:
            start = torch.tensor([starts[span] for span in group])[:, None]
            size = torch.tensor([sizes[span] for span in group])[:, None]
            place = torch.arange(sizes[group[0]])[None, :]
            valid = place < size
            groups.append((torch.where(valid, start + place, start), valid, sizes[group[-1]] != sizes[group[0]]))
        return groups


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the layout says what the mask would say
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: AttentionLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' interface: `(1, heads, T, head_dim)` in, `(1, T, heads, head_dim)` out.

    Args:
        module: the attention layer.
        query: queries.
        key: keys.
        value: values.
        attention_mask: unused.
        scaling: factor on the scores; None means 1 / sqrt(head_dim).
        dropout: probability that an attention weight is dropped.
        packed_layout: the groups of spans.
        kwargs: `sliding_window` w limits attention to |i - j| < w, as ModernBERT's local layers ask.
    """
    if packed_layout is None:
        raise ValueError(f"{type(module).__name__}: packed attention needs packed_layout")
    window = kwargs.get("sliding_window")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _attend_by_kernel(query, key, value, packed_layout, scaling, window), None
    # not in training: where a step may have one span, or spans of one length, compiled code would be made twice
    table = packed_layout.is_table and not torch.is_grad_enabled()
    if not table:
        rows = torch.stack([query[0], key[0], value[0]]).transpose(1, 2)  # (3, T, heads, head_dim)
    outputs = []
    for group in packed_layout.groups:
        if table:
            q, k, v = (each[0].unflatten(1, group.tokens.shape).transpose(0, 1) for each in (query, key, value))
        else:
            q, k, v = rows[:, group.tokens].transpose(2, 3)  # each (spans, heads, longest, head_dim)
        mask = None if group.valid is None else group.valid[:, None, None, :]
        longest = group.tokens.shape[1]
        if window is not None and longest > window:
            place = torch.arange(longest, device=query.device)
            near = (place[:, None] - place[None, :]).abs() < window
            mask = near if mask is None else mask & near
        if dropout:
            attended = _attend_with_dropout(module, q, k, v, mask, scaling, dropout, packed_layout.token_keys, group)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        attended = attended.transpose(1, 2)
        outputs.append(attended.flatten(0, 1) if group.valid is None else attended[group.valid])
    return (outputs[0] if table else torch.cat(outputs)[packed_layout.order])[None], None


def _attend_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scaling: float | None, window: int | None
) -> Tensor:
    """Torch's variable-length attention: one call for all spans, half precision on a GPU, no dropout."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))  # each (T, heads, head_dim)
    reach = -1 if window is None else window - 1
    attended = varlen_attn(
        q,
        k,
        v,
        layout.bounds,
        layout.bounds,
        layout.longest,
        layout.longest,
        scale=scaling,
        window_size=(reach, reach),
    )
    assert isinstance(attended, Tensor)
    return attended[None]


def _attend_with_dropout(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    token_keys: Tensor | None,
    group: AttentionGroup,
) -> Tensor:
    """Attention with its weights written out, because their dropout is keyed by token and must be repeatable."""
    if token_keys is None:
        raise RuntimeError("attention dropout needs the keys of its tokens: SpanBatch.keys is missing")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        # not -inf: a place beyond its span may see no key at all, and its NaN would reach every gradient
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=scores.dtype if scores.dtype == torch.float64 else torch.float32)
    layer, heads, longest = _layer_number(module), scores.shape[1], scores.shape[2]
    dropped = _DROPOUT.dropped(token_keys[group.tokens], layer, heads, longest, dropout)
    return (weights.masked_fill(dropped, 0.0) * (1 / (1 - dropout))).to(value.dtype) @ value


def number_modules(model: torch.nn.Module) -> None:
    """Gives every module of an encoder a number, for attention layers that do not know their own."""
    for number, module in enumerate(model.modules()):
        module.declutr_number = number  # type: ignore[assignment]


def _layer_number(module: torch.nn.Module) -> int:
    number = getattr(module, "layer_idx", None)
    number = module.declutr_number if number is None else number
    assert isinstance(number, int)
    return number


_DROPOUT = AttentionDropout()


def register() -> None:
    """Makes packed attention known to transformers as PACKED."""
    from transformers import AttentionInterface

    # The layout differs in every batch, so torch.compile leaves attention alone and compiles what lies between.
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
