"""Attention over packed spans: one row of tokens, in which no span attends to another.

It is registered with transformers' attention interface, so encoder families work unchanged. Linear layers process each
real token once and no padding; only attention groups spans of similar length.

On a GPU, torch's kernel for spans of different lengths computes all spans in one call, inside of torch.compile's graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from declutr.common.console.logs import get_logger
from declutr.trainer.data.packedbatch import TokenRates, to_device
from declutr.trainer.model.dropout import (
    DropoutKeys,
    WeightDropout,
    attend_in_parts,
    attend_with_dropout,
    padded_attention,
    weight_dropout,
)

PACKED = "declutr_packed"
PADDED = "declutr_padded"
# A group of spans is one attention call, padded to its longest span. Merging saves calls but wastes multiplications. A
# span joins a group if its length is at least this share of the group's longest, or if the group's longest is short.
_MIN_FILL = 0.75
_SMALL_TOKENS = 96
# Kernels start a block of threads for each of this many tokens of the longest span, so its length is rounded up to a
# multiple: a larger number than needed costs nothing, and torch.compile sees few different ones.
_LENGTH_UNIT = 128
_LEAST_CAPABILITY = (8, 0)  # Ampere
_MOST_HEAD_SIZE = 256  # FlashAttention-2's
_HEAD_SIZE_UNIT = 8  # 16 bytes in half precision, as its loads need
_HALF = (torch.bfloat16, torch.float16)


class Kernels(NamedTuple):
    """Kernels of a GPU, each of which computes the attention of all spans in one call."""

    attend: Callable[..., Tensor]  # the function below, or that of trainer/model/span_attention.py
    attend_dropout: Callable[..., Tensor] | None = None  # the latter, which also drops weights; None: groups do


@dataclass(eq=False)
class AttentionLayout:
    """Positions of spans in a packed row, and inputs of attention, which are computed at first use."""

    lengths: Tensor  # `(S,)` number of tokens of each span in packed order, on the CPU
    device: torch.device  # device of the row
    token_keys: Tensor | None  # `(T,)` keys of the tokens, for attention dropout; None without dropout
    rates: TokenRates | None  # `(T,)` rates of attention dropout; None: every layer has its own rate
    kernels: Kernels | None  # compute attention in half precision; None: groups do
    # `(S + 1,)` int32 start positions of the spans, and the end of the last, on the device; for the kernels.
    bounds: Tensor

    def __post_init__(self) -> None:
        """Rounds the length of the longest span up, and puts the longest spans first, for the kernels."""
        self.longest = -(-int(self.lengths.numpy().max(initial=1)) // _LENGTH_UNIT) * _LENGTH_UNIT
        self.order = self.bounds
        if self.kernels is not None:
            # one more, as `bounds` has, because torch.compile makes a graph of its own for tensors of one element
            order = F.pad(self.lengths.argsort(descending=True, stable=True), (0, 1))
            self.order = to_device(order.int(), self.device)

    @cached_property
    def groups(self) -> tuple[list[tuple[Tensor, Tensor | None]], Tensor]:
        """Groups of spans of similar length, which attend in one call and cover every token once.

        Of each, `(spans, longest)` positions in the packed row, which repeat a span's first token beyond its end, and
        `(spans, longest)` True for tokens; None when all spans have the same length. Behind the groups, `(T,)` position
        of each packed token in the concatenation of their entries.
        """
        starts = (self.lengths.cumsum(0) - self.lengths).tolist()
        sizes = self.lengths.tolist()
        members: list[list[int]] = []
        # The longest first, as it decides the padding.
        for span in sorted(range(len(sizes)), key=lambda span: -sizes[span]):
            longest = sizes[members[-1][0]] if members else 0
            if members and (sizes[span] >= _MIN_FILL * longest or longest <= _SMALL_TOKENS):
                members[-1].append(span)
            else:
                members.append([span])
        groups, order, entries = [], torch.empty(sum(sizes), dtype=torch.int64), 0
        for group in members:
            start = torch.tensor([starts[span] for span in group])[:, None]
            size = torch.tensor([sizes[span] for span in group])[:, None]
            place = torch.arange(sizes[group[0]])[None, :]
            valid = place < size
            tokens = torch.where(valid, start + place, start)  # any token will do: its key is masked, its row dropped
            order[tokens[valid]] = entries + valid.flatten().nonzero()[:, 0]
            entries += valid.numel()
            ragged = sizes[group[-1]] != sizes[group[0]]
            groups.append((to_device(tokens, self.device), to_device(valid, self.device) if ragged else None))
        return groups, to_device(order, self.device)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the layout replaces the mask
    scaling: float | None = None,  # factor of the scores; None: 1 / sqrt(head_dim)
    dropout: float = 0.0,  # probability of dropping an attention weight
    packed_layout: AttentionLayout | None = None,  # positions of the spans
    **kwargs: Any,  # `sliding_window` w limits attention to |i - j| < w, for ModernBERT's local layers
) -> tuple[Tensor, None]:
    """Computes attention in transformers' interface: `(1, heads, T, head_dim)` in, `(1, T, heads, head_dim)` out."""
    if packed_layout is None:
        raise ValueError(f"{type(module).__name__}: packed attention needs packed_layout")
    window, kernels = kwargs.get("sliding_window"), packed_layout.kernels
    drop = weight_dropout(module, dropout, packed_layout.token_keys, packed_layout.rates)
    kernel = kernels and (kernels.attend if drop is None else kernels.attend_dropout)
    if query.dtype not in _HALF:
        kernel = None
    packs = getattr(module, "packs", False)  # keys and values are behind the queries (trainer/model/half.py)
    if packs and kernel in (None, attend):
        (query, key, value), packs = query.unflatten(1, (3, -1)).unbind(1), False
    if kernel is None:
        return attend_in_groups(query, key, value, scaling, window, drop, packed_layout), None
    inputs = [tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in ([query] if packs else [query, key, value])]
    rest = packed_layout.bounds, packed_layout.order, packed_layout.longest, scaling, window
    return kernel(inputs, *rest, *([] if drop is None else [drop]))[None], None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the groups differ in every batch: a break between layers
def attend_in_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    drop: WeightDropout | None,
    layout: AttentionLayout,
) -> Tensor:
    """As `packed_attention`, with one call for each group of spans of similar length; `drop` has keys `(T,)`."""
    groups, order = layout.groups
    # The row of spans of one length can be viewed as their table without copying. Not in training: some steps have one
    # span, or spans of one length, and would cause a second compilation.
    table = len(groups) == 1 and groups[0][1] is None and not torch.is_grad_enabled()
    if not table:
        rows = torch.stack([query[0], key[0], value[0]]).transpose(1, 2)  # (3, T, heads, head_dim)
    outputs = []
    for tokens, valid in groups:
        if table:
            q, k, v = (tensor[0].unflatten(1, tokens.shape).transpose(0, 1) for tensor in (query, key, value))
        else:
            q, k, v = rows[:, tokens].transpose(2, 3)  # each (spans, heads, longest, head_dim)
        mask = None if valid is None else valid[:, None, None, :]
        longest = tokens.shape[1]
        if window is not None and longest > window:
            place = torch.arange(longest, device=query.device)
            near = (place[:, None] - place[None, :]).abs() < window
            mask = near if mask is None else mask & near  # a group of short spans has no padding mask
        if drop is not None:
            explicit = attend_in_parts if query.is_cuda else attend_with_dropout
            group_drop = drop.rearranged(lambda tensor, places=tokens: tensor[places])  # type: ignore[misc]
            attended = explicit(q, k, v, mask, scaling, group_drop)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return (outputs[0] if table else torch.cat(outputs)[order])[None]


def prepare_modules(model: torch.nn.Module, keys: DropoutKeys) -> None:
    """Gives every module of an encoder its tokens' keys and a number: `layer_idx`, or its place among all modules.

    The number is a scalar tensor, because torch.compile makes a graph for each number, and one for all tensors.
    """
    for place, module in enumerate(model.modules()):
        number = getattr(module, "layer_idx", None)
        module.declutr_number = torch.tensor(place if number is None else number, device="cpu")
        module.declutr_keys = keys  # type: ignore[assignment]


def register() -> None:
    """Registers both layouts' attention with transformers, as PACKED and PADDED."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(PADDED, torch.compiler.disable(padded_attention))
    AttentionMaskInterface.register(PADDED, sdpa_mask)


def attend(
    tensors: list[Tensor],  # queries, keys and values `(T, heads, head_dim)` in half precision
    bounds: Tensor,  # `(S + 1,)` int32 start of each span, and the end of the last
    order: Tensor,  # noqa: ARG001 - the kernel has its own
    longest: int,  # at least the tokens of the longest span
    scaling: float | None,  # factor of the scores; None: 1 / sqrt(head_dim)
    window: int | None,  # w of |i - j| < w; None: the whole span
) -> Tensor:
    """Attention within spans, `(T, heads, head_dim)`, in one call for all spans."""
    reach = -1 if window is None else window - 1  # the kernel's limit is |i - j| <= reach, and -1 none
    query, key, value = tensors
    output = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scaling, window_size=(reach, reach))
    assert isinstance(output, Tensor)
    return output


def kernel_problem(
    capability: tuple[int, int],  # compute capability of the GPU
    head_size: int,  # size of an attention head
) -> str | None:
    """The reason why the kernel cannot run, or None."""
    if capability < _LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and the kernel needs 8.0"
    if head_size % _HEAD_SIZE_UNIT or head_size > _MOST_HEAD_SIZE:
        return f"the head size is {head_size}, and the kernel needs a multiple of 8 up to 256"
    return None


def fitting_kernels(
    model: torch.nn.Module,  # the encoder
    device: torch.device,  # its device
    drops: bool,  # attention weights are dropped
    own: bool = False,  # take this project's kernel without dropout too (`scaling.experimental`)
) -> Kernels | None:
    """The kernels for an encoder's attention on a device; a line in the log says which a GPU cannot use."""
    if device.type != "cuda":
        if own:
            _warn_once(f"scaling.experimental has no effect on {device.type}: it is for GPUs")
        return None
    config: Any = model.config
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if problem := kernel_problem(torch.cuda.get_device_capability(device), head_size):
        _warn_once(f"attention computes spans of similar length together, which is slower: {problem}")
        return None
    dropping = own_kernel(head_size, device, drops=True) if drops else None
    return Kernels((own_kernel(head_size, device, drops=False) if own else None) or attend, dropping)


def own_kernel(head_size: int, device: torch.device, drops: bool) -> Any:
    """This project's kernel; None, with a line in the log, if it does not work on the device."""
    problem: str | None = "the package triton is missing; install torch for CUDA"
    if find_spec("triton") is not None:
        from declutr.trainer.model import span_attention  # needs Triton

        problem = span_attention.problem(head_size, device, drops)
        if problem is None:
            return span_attention.attend_spans
    instead = "attention dropout stores the weights of some spans at a time, which is slower"
    _warn_once(f"{instead if drops else 'this part of scaling.experimental has no effect'}: {problem}")
    return None


@lru_cache
def _warn_once(message: str) -> None:
    """Logs a message once in a process, which may have several encoders."""
    get_logger().warning("%s", message)
