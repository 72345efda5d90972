"""Triton kernels: attention within packed spans whose weights are dropped by token; no weight is ever stored.

Forward and backward compute a block of scores at a time and its mask from the keys, as `drop_attention` does. With
weights P = softmax(s Q K^T) of a span, factors F (0 where a weight is dropped, else 1 / (1 - p)), and O = (P F) V:

    dV = (P F)^T dO    dP = F (dO V^T)    dS = s P (dP - rowsum(dO O))    dQ = dS K    dK = dS^T Q

Every sum has one order, so a repeated step has the same bits. Legend: T tokens, S spans.
"""

import triton
import triton.language as tl

from trainer.data.tokenrates import signed

BLOCK = tl.constexpr(64)  # queries, or keys, that a program has at a time
_HIDDEN = tl.constexpr(-1.0e30)  # score of a key that is not attended to; its difference to itself is not NaN
_FIRST = tl.constexpr(0x7FEB352D)  # the mix of trainer/data/tokenrates.py
_SECOND = tl.constexpr(signed(0x846CA68B))


@triton.jit
def _rows(pointer, start, places, length, head, heads, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Pointers `(BLOCK, WIDE)` to the features of a span's tokens in one head, and which of them exist."""
    features = tl.arange(0, WIDE)
    offsets = ((start + places).to(tl.int64)[:, None] * heads + head) * SIZE + features[None, :]
    return pointer + offsets, (places < length)[:, None] & (features < SIZE)[None, :]


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
def _factors(keys, words, limits, kept):
    """0 where a weight is dropped, else 1 / (1 - p)."""
    mixed = keys[:, None] + words[None, :]
    mixed = mixed ^ (mixed >> 16)
    mixed = mixed * _FIRST
    mixed = mixed ^ (mixed >> 15)
    mixed = mixed * _SECOND
    return tl.where(mixed < limits[:, None], 0.0, kept[:, None])


@triton.jit
def _dropout_of(keys, limits, kept, start, rows, length):
    """Key, limit and factor of each query token."""
    there = rows < length
    found = tl.load(keys + start + rows, there, other=0)
    return found, tl.load(limits + start + rows, there, other=0), tl.load(kept + start + rows, there, other=0.0)


@triton.jit
def _reach(first, length, WINDOW: tl.constexpr):
    """First and last + 1 of the tokens that a block of tokens attends to, or is attended by."""
    low, high = first * 0, length
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK * BLOCK
        high = tl.minimum(first + BLOCK + WINDOW - 1, length)
    return low, high


@triton.jit
def forward(
    query, key, value, out, sums, bounds, keys, limits, kept, words, num_words, scale, heads,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Output and log-sum of a block of queries."""
    first, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    start = tl.load(bounds + tl.program_id(2))
    length = tl.load(bounds + tl.program_id(2) + 1) - start
    if first < length:
        rows = first + tl.arange(0, BLOCK)
        places, there = _rows(query, start, rows, length, head, heads, SIZE, WIDE)
        q = tl.load(places, there, other=0.0)
        token_keys, token_limits, token_kept = _dropout_of(keys, limits, kept, start, rows, length)
        largest = tl.full((BLOCK,), _HIDDEN, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        made = tl.zeros((BLOCK, WIDE), tl.float32)
        low, high = _reach(first, length, WINDOW)
        for begin in range(low, high, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            places, there = _rows(key, start, columns, length, head, heads, SIZE, WIDE)
            scores, _ = _scores(q, tl.load(places, there, other=0.0), rows, columns, length, scale, WINDOW)
            above = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp(scores - above[:, None])
            shrunk = tl.exp(largest - above)
            total = total * shrunk + tl.sum(weights, 1)
            word = tl.load(words + head * num_words + columns, columns < length, other=0)
            weights = weights * _factors(token_keys, word, token_limits, token_kept)
            places, there = _rows(value, start, columns, length, head, heads, SIZE, WIDE)
            v = tl.load(places, there, other=0.0)
            made = made * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            largest = above
        places, there = _rows(out, start, rows, length, head, heads, SIZE, WIDE)
        tl.store(places, (made / total[:, None]).to(out.dtype.element_ty), there)
        tl.store(sums + (start + rows) * heads + head, largest + tl.log(total), rows < length)


@triton.jit
def backward_queries(
    query, key, value, gradient, sums, dots, bounds, keys, limits, kept, words, num_words, scale, heads, of_query,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of queries."""
    first, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    start = tl.load(bounds + tl.program_id(2))
    length = tl.load(bounds + tl.program_id(2) + 1) - start
    if first < length:
        rows = first + tl.arange(0, BLOCK)
        places, there = _rows(query, start, rows, length, head, heads, SIZE, WIDE)
        q = tl.load(places, there, other=0.0)
        places, there = _rows(gradient, start, rows, length, head, heads, SIZE, WIDE)
        g = tl.load(places, there, other=0.0)
        token_keys, token_limits, token_kept = _dropout_of(keys, limits, kept, start, rows, length)
        total = tl.load(sums + (start + rows) * heads + head, rows < length, other=0.0)
        dot = tl.load(dots + (start + rows) * heads + head, rows < length, other=0.0)
        made = tl.zeros((BLOCK, WIDE), tl.float32)
        low, high = _reach(first, length, WINDOW)
        for begin in range(low, high, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            places, there = _rows(key, start, columns, length, head, heads, SIZE, WIDE)
            k = tl.load(places, there, other=0.0)
            scores, near = _scores(q, k, rows, columns, length, scale, WINDOW)
            weights = tl.where(near, tl.exp(scores - total[:, None]), 0.0)
            places, there = _rows(value, start, columns, length, head, heads, SIZE, WIDE)
            v = tl.load(places, there, other=0.0)
            word = tl.load(words + head * num_words + columns, columns < length, other=0)
            of_weights = tl.dot(g, tl.trans(v), input_precision="ieee")
            of_weights = of_weights * _factors(token_keys, word, token_limits, token_kept)
            of_scores = weights * (of_weights - dot[:, None]) * scale
            made += tl.dot(of_scores.to(k.dtype), k, input_precision="ieee")
        places, there = _rows(of_query, start, rows, length, head, heads, SIZE, WIDE)
        tl.store(places, made.to(of_query.dtype.element_ty), there)


@triton.jit
def backward_keys(
    query, key, value, gradient, sums, dots, bounds, keys, limits, kept, words, num_words, scale, heads,
    of_key, of_value, WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and of their values."""
    first, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    start = tl.load(bounds + tl.program_id(2))
    length = tl.load(bounds + tl.program_id(2) + 1) - start
    if first < length:
        columns = first + tl.arange(0, BLOCK)
        places, there = _rows(key, start, columns, length, head, heads, SIZE, WIDE)
        k = tl.load(places, there, other=0.0)
        places, there = _rows(value, start, columns, length, head, heads, SIZE, WIDE)
        v = tl.load(places, there, other=0.0)
        word = tl.load(words + head * num_words + columns, columns < length, other=0)
        made_key = tl.zeros((BLOCK, WIDE), tl.float32)
        made_value = tl.zeros((BLOCK, WIDE), tl.float32)
        low, high = _reach(first, length, WINDOW)
        for begin in range(low, high, BLOCK):
            rows = begin + tl.arange(0, BLOCK)
            places, there = _rows(query, start, rows, length, head, heads, SIZE, WIDE)
            q = tl.load(places, there, other=0.0)
            places, there = _rows(gradient, start, rows, length, head, heads, SIZE, WIDE)
            g = tl.load(places, there, other=0.0)
            token_keys, token_limits, token_kept = _dropout_of(keys, limits, kept, start, rows, length)
            total = tl.load(sums + (start + rows) * heads + head, rows < length, other=0.0)
            dot = tl.load(dots + (start + rows) * heads + head, rows < length, other=0.0)
            scores, near = _scores(q, k, rows, columns, length, scale, WINDOW)
            weights = tl.where(near, tl.exp(scores - total[:, None]), 0.0)
            factors = _factors(token_keys, word, token_limits, token_kept)
            made_value += tl.dot(tl.trans(weights * factors).to(g.dtype), g, input_precision="ieee")
            of_weights = tl.dot(g, tl.trans(v), input_precision="ieee") * factors
            of_scores = weights * (of_weights - dot[:, None]) * scale
            made_key += tl.dot(tl.trans(of_scores).to(q.dtype), q, input_precision="ieee")
        places, there = _rows(of_key, start, columns, length, head, heads, SIZE, WIDE)
        tl.store(places, made_key.to(of_key.dtype.element_ty), there)
        places, there = _rows(of_value, start, columns, length, head, heads, SIZE, WIDE)
        tl.store(places, made_value.to(of_value.dtype.element_ty), there)
