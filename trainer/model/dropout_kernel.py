"""Triton kernels: attention within packed spans whose weights are dropped by token; no weight is ever stored.

Forward and backward compute a block of scores at a time and its mask from the keys, as `WeightDropout.apply` does. With
weights P = softmax(s Q K^T) of a span, factors F (0 where a weight is dropped, else 1 / (1 - p)), and O = (P F) V:

    dV = (P F)^T dO    dP = F (dO V^T)    dS = s P (dP - rowsum(dO O))    dQ = dS K    dK = dS^T Q

Every sum has one order, so a repeated step has the same bits. Legend: T tokens, S spans.
"""

import triton
import triton.language as tl

from declutr.trainer.data.packedbatch import signed

BLOCK = tl.constexpr(64)  # queries, or keys, that a program has at a time
_HIDDEN = tl.constexpr(-1.0e30)  # score of a key that is not attended to; its difference to itself is not NaN
_FIRST = tl.constexpr(0x7FEB352D)  # the mix of trainer/data/packedbatch.py
_SECOND = tl.constexpr(signed(0x846CA68B))


@triton.jit
def _places(pointer, start, rows, length, head, heads, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Pointers `(BLOCK, WIDE)` to the features of a span's tokens in one head, and which of them exist."""
    features = tl.arange(0, WIDE)
    offsets = ((start + rows).to(tl.int64)[:, None] * heads + head) * SIZE + features[None, :]
    return pointer + offsets, (rows < length)[:, None] & (features < SIZE)[None, :]


@triton.jit
def _load(pointer, start, rows, length, head, heads, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Features of a span's tokens in one head, and 0 where there are none."""
    places, there = _places(pointer, start, rows, length, head, heads, SIZE, WIDE)
    return tl.load(places, there, other=0.0)


@triton.jit
def _store(pointer, values, start, rows, length, head, heads, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Writes features of a span's tokens in one head."""
    places, there = _places(pointer, start, rows, length, head, heads, SIZE, WIDE)
    tl.store(places, values.to(pointer.dtype.element_ty), there)


@triton.jit
def _block(bounds, WINDOW: tl.constexpr):
    """Start and length of this program's span, the block's tokens, and the tokens [low, high) that they attend to.

    The same tokens attend to them.
    """
    first = tl.program_id(0) * BLOCK
    start = tl.load(bounds + tl.program_id(2))
    length = tl.load(bounds + tl.program_id(2) + 1) - start
    low, high = first * 0, length
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK * BLOCK
        high = tl.minimum(first + BLOCK + WINDOW - 1, length)
    return start, length, first + tl.arange(0, BLOCK), low, tl.where(first < length, high, low)


@triton.jit
def _scores(query, key, rows, columns, length, scale, WINDOW: tl.constexpr):
    """Scores of a block, and True where the row's token attends to the column's."""
    near = (rows < length)[:, None] & (columns < length)[None, :]
    if WINDOW > 0:
        apart = rows[:, None] - columns[None, :]
        near = near & (apart < WINDOW) & (apart > -WINDOW)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    return tl.where(near, scores, _HIDDEN), near


@triton.jit
def _factors(keys, limits, kept, words, start, rows, columns, length, head, num_words):
    """F of a block: 0 where a weight is dropped, else 1 / (1 - p)."""
    there = rows < length
    key = tl.load(keys + start + rows, there, other=0)
    limit = tl.load(limits + start + rows, there, other=0)
    factor = tl.load(kept + start + rows, there, other=0.0)
    mixed = key[:, None] + tl.load(words + head * num_words + columns, columns < length, other=0)[None, :]
    mixed = mixed ^ (mixed >> 16)
    mixed = mixed * _FIRST
    mixed = mixed ^ (mixed >> 15)
    mixed = mixed * _SECOND
    return tl.where(mixed < limit[:, None], 0.0, factor[:, None])


@triton.jit
def _differentiate(q, k, v, g, sums, dots, factors, start, rows, columns, length, head, heads, scale,
                   WINDOW: tl.constexpr):  # fmt: skip
    """P and dS of a block."""
    total = tl.load(sums + (start + rows) * heads + head, rows < length, other=0.0)
    dot = tl.load(dots + (start + rows) * heads + head, rows < length, other=0.0)
    scores, near = _scores(q, k, rows, columns, length, scale, WINDOW)
    weights = tl.where(near, tl.exp(scores - total[:, None]), 0.0)
    of_weights = tl.dot(g, tl.trans(v), input_precision="ieee") * factors
    return weights, weights * (of_weights - dot[:, None]) * scale


@triton.jit
def forward(
    query, key, value, out, sums, bounds, keys, limits, kept, words, num_words, scale, heads,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """O and log-sums of a block of queries."""
    start, length, rows, low, high = _block(bounds, WINDOW)
    head = tl.program_id(1)
    q = _load(query, start, rows, length, head, heads, SIZE, WIDE)
    largest = tl.full((BLOCK,), _HIDDEN, tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    output = tl.zeros((BLOCK, WIDE), tl.float32)
    for begin in range(low, high, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        k = _load(key, start, columns, length, head, heads, SIZE, WIDE)
        v = _load(value, start, columns, length, head, heads, SIZE, WIDE)
        scores, _ = _scores(q, k, rows, columns, length, scale, WINDOW)
        above = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - above[:, None])
        shrunk = tl.exp(largest - above)
        total = total * shrunk + tl.sum(weights, 1)
        weights = weights * _factors(keys, limits, kept, words, start, rows, columns, length, head, num_words)
        output = output * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = above
    total = tl.where(rows < length, total, 1.0)
    _store(out, output / total[:, None], start, rows, length, head, heads, SIZE, WIDE)
    tl.store(sums + (start + rows) * heads + head, largest + tl.log(total), rows < length)


@triton.jit
def backward_queries(
    query, key, value, gradient, sums, dots, bounds, keys, limits, kept, words, num_words, scale, heads, of_query,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradient dQ of a block of queries."""
    start, length, rows, low, high = _block(bounds, WINDOW)
    head = tl.program_id(1)
    q = _load(query, start, rows, length, head, heads, SIZE, WIDE)
    g = _load(gradient, start, rows, length, head, heads, SIZE, WIDE)
    sum_query = tl.zeros((BLOCK, WIDE), tl.float32)
    for begin in range(low, high, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        k = _load(key, start, columns, length, head, heads, SIZE, WIDE)
        v = _load(value, start, columns, length, head, heads, SIZE, WIDE)
        factors = _factors(keys, limits, kept, words, start, rows, columns, length, head, num_words)
        _, of_scores = _differentiate(
            q, k, v, g, sums, dots, factors, start, rows, columns, length, head, heads, scale, WINDOW
        )
        sum_query += tl.dot(of_scores.to(k.dtype), k, input_precision="ieee")
    _store(of_query, sum_query, start, rows, length, head, heads, SIZE, WIDE)


@triton.jit
def backward_keys(
    query, key, value, gradient, sums, dots, bounds, keys, limits, kept, words, num_words, scale, heads,
    of_key, of_value, WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients dK and dV of a block of keys."""
    start, length, columns, low, high = _block(bounds, WINDOW)
    head = tl.program_id(1)
    k = _load(key, start, columns, length, head, heads, SIZE, WIDE)
    v = _load(value, start, columns, length, head, heads, SIZE, WIDE)
    sum_key = tl.zeros((BLOCK, WIDE), tl.float32)
    sum_value = tl.zeros((BLOCK, WIDE), tl.float32)
    for begin in range(low, high, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        q = _load(query, start, rows, length, head, heads, SIZE, WIDE)
        g = _load(gradient, start, rows, length, head, heads, SIZE, WIDE)
        factors = _factors(keys, limits, kept, words, start, rows, columns, length, head, num_words)
        weights, of_scores = _differentiate(
            q, k, v, g, sums, dots, factors, start, rows, columns, length, head, heads, scale, WINDOW
        )
        sum_value += tl.dot(tl.trans(weights * factors).to(g.dtype), g, input_precision="ieee")
        sum_key += tl.dot(tl.trans(of_scores).to(q.dtype), q, input_precision="ieee")
    _store(of_key, sum_key, start, columns, length, head, heads, SIZE, WIDE)
    _store(of_value, sum_value, start, columns, length, head, heads, SIZE, WIDE)
