"""Triton kernels: attention within packed spans, with weights dropped by token or with all; no weight is ever stored.

Forward and backward compute a block of scores at a time and its mask from the keys, as `WeightDropout.apply` does. With
weights P = softmax(s Q K^T) of a span, factors F (0 where a weight is dropped, else 1 / (1 - p), and 1 without
dropout), and O = (P F) V:

    dV = (P F)^T dO    dP = F (dO V^T)    dS = P (dP - rowsum(dO O))    dQ = s dS K    dK = s dS^T Q

Powers are of 2, which a GPU computes in one instruction. Only blocks at the end of a span, and all blocks of a window,
are masked. Spans start in the order `order`, the longest first, so that no multiprocessor waits for one that began
late. Every sum has one order, so a repeated step has the same bits. Legend: T tokens, S spans.
"""

import triton
import triton.language as tl

from declutr.trainer.data.packedbatch import signed

BLOCK = tl.constexpr(64)  # queries, or keys, that a program has at a time
_HIDDEN = tl.constexpr(-1.0e30)  # score of a key that is not attended to; its difference to itself is not NaN
_LOG2_E = tl.constexpr(1.4426950408889634)
_FIRST = tl.constexpr(0x7FEB352D)  # the mix of trainer/data/packedbatch.py
_SECOND = tl.constexpr(signed(0x846CA68B))


@triton.jit
def _load(pointer, start, rows, length, head, pitch, EDGE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Features `(BLOCK, WIDE)` of a span's tokens in one head, and 0 where there are none; without EDGE all exist.

    A token begins `pitch` numbers behind the one before it: queries, keys and values may be thirds of one tensor.
    """
    features = tl.arange(0, WIDE)
    offsets = (start + rows).to(tl.int64)[:, None] * pitch + head * SIZE + features[None, :]
    if EDGE or SIZE < WIDE:
        return tl.load(pointer + offsets, (rows < length)[:, None] & (features < SIZE)[None, :], other=0.0)
    else:  # noqa: RET505 - Triton returns at the end of a branch
        return tl.load(pointer + offsets)


@triton.jit
def _store(pointer, values, start, rows, length, head, pitch, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Writes features of a span's tokens in one head."""
    features = tl.arange(0, WIDE)
    offsets = (start + rows).to(tl.int64)[:, None] * pitch + head * SIZE + features[None, :]
    there = (rows < length)[:, None] & (features < SIZE)[None, :]
    tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), there)


@triton.jit
def _block(bounds, order, WINDOW: tl.constexpr):
    """Start and length of this program's span, the block's tokens, and the tokens [low, high) that they attend to.

    The same tokens attend to them. From `edge` on, blocks of them need a mask.
    """
    span = tl.load(order + tl.program_id(2))
    first = tl.program_id(0) * BLOCK
    start = tl.load(bounds + span)
    length = tl.load(bounds + span + 1) - start
    low, high = first * 0, length
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK * BLOCK
        high = tl.minimum(first + BLOCK + WINDOW - 1, length)
    high = tl.where(first < length, high, low)
    edge = low if WINDOW > 0 else high // BLOCK * BLOCK
    return start, length, first + tl.arange(0, BLOCK), low, edge, high


@triton.jit
def _near(rows, columns, length, WINDOW: tl.constexpr):
    """True where the row's token attends to the column's."""
    near = (rows < length)[:, None] & (columns < length)[None, :]
    if WINDOW > 0:
        apart = rows[:, None] - columns[None, :]
        near = near & (apart < WINDOW) & (apart > -WINDOW)
    return near


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
def _attend(
    q, largest, total, output, key, value, keys, limits, kept, words, num_words, start, rows, begin, length, head,
    pitch, scale, EDGE: tl.constexpr, DROP: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of the weights and O after a further block of keys."""
    columns = begin + tl.arange(0, BLOCK)
    k = _load(key, start, columns, length, head, pitch, EDGE, SIZE, WIDE)
    v = _load(value, start, columns, length, head, pitch, EDGE, SIZE, WIDE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2_E)
    if EDGE:
        scores = tl.where(_near(rows, columns, length, WINDOW), scores, _HIDDEN)
    above = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - above[:, None])
    shrunk = tl.exp2(largest - above)
    total = total * shrunk + tl.sum(weights, 1)
    if DROP:
        weights = weights * _factors(keys, limits, kept, words, start, rows, columns, length, head, num_words)
    return above, total, output * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")


@triton.jit
def forward(
    query, key, value, out, sums, bounds, order, keys, limits, kept, words, num_words, scale, heads, pitch,
    DROP: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """O and log2-sums of a block of queries."""
    start, length, rows, low, edge, high = _block(bounds, order, WINDOW)
    head = tl.program_id(1)
    q = _load(query, start, rows, length, head, pitch, True, SIZE, WIDE)
    largest = tl.full((BLOCK,), _HIDDEN, tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    output = tl.zeros((BLOCK, WIDE), tl.float32)
    for begin in range(low, edge, BLOCK):
        largest, total, output = _attend(
            q, largest, total, output, key, value, keys, limits, kept, words, num_words, start, rows, begin, length,
            head, pitch, scale, False, DROP, WINDOW, SIZE, WIDE,
        )  # fmt: skip
    for begin in range(edge, high, BLOCK):
        largest, total, output = _attend(
            q, largest, total, output, key, value, keys, limits, kept, words, num_words, start, rows, begin, length,
            head, pitch, scale, True, DROP, WINDOW, SIZE, WIDE,
        )  # fmt: skip
    total = tl.where(rows < length, total, 1.0)
    _store(out, output / total[:, None], start, rows, length, head, heads * SIZE, SIZE, WIDE)
    tl.store(sums + (start + rows) * heads + head, largest + tl.log2(total), rows < length)


@triton.jit
def _differentiate(
    q, k, v, g, total, dot, keys, limits, kept, words, num_words, start, rows, columns, length, head, scale,
    EDGE: tl.constexpr, DROP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """P F and dS of a block, from the log-sums and rowsum(dO O) of its rows."""
    weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2_E) - total[:, None])
    if EDGE:
        weights = tl.where(_near(rows, columns, length, WINDOW), weights, 0.0)
    of_weights = tl.dot(g, tl.trans(v), input_precision="ieee")
    dropped = weights
    if DROP:
        factors = _factors(keys, limits, kept, words, start, rows, columns, length, head, num_words)
        dropped = weights * factors
        of_weights = of_weights * factors
    return dropped, weights * (of_weights - dot[:, None])


@triton.jit
def _query_block(
    q, g, total, dot, sum_query, key, value, keys, limits, kept, words, num_words, start, rows, begin, length, head,
    pitch, scale, EDGE: tl.constexpr, DROP: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sum dS K after a further block of keys."""
    columns = begin + tl.arange(0, BLOCK)
    k = _load(key, start, columns, length, head, pitch, EDGE, SIZE, WIDE)
    v = _load(value, start, columns, length, head, pitch, EDGE, SIZE, WIDE)
    _, of_scores = _differentiate(
        q, k, v, g, total, dot, keys, limits, kept, words, num_words, start, rows, columns, length, head, scale,
        EDGE, DROP, WINDOW,
    )  # fmt: skip
    return sum_query + tl.dot(of_scores.to(k.dtype), k, input_precision="ieee")


@triton.jit
def backward_queries(
    query, key, value, gradient, out, sums, dots, bounds, order, keys, limits, kept, words, num_words, scale, heads,
    pitch, of_query, DROP: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradient dQ of a block of queries, and rowsum(dO O), which `backward_keys` reads."""
    start, length, rows, low, edge, high = _block(bounds, order, WINDOW)
    head = tl.program_id(1)
    q = _load(query, start, rows, length, head, pitch, True, SIZE, WIDE)
    g = _load(gradient, start, rows, length, head, heads * SIZE, True, SIZE, WIDE)
    o = _load(out, start, rows, length, head, heads * SIZE, True, SIZE, WIDE)
    dot = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(dots + (start + rows) * heads + head, dot, rows < length)
    # beyond the span P is 0
    total = tl.load(sums + (start + rows) * heads + head, rows < length, other=float("inf"))
    sum_query = tl.zeros((BLOCK, WIDE), tl.float32)
    for begin in range(low, edge, BLOCK):
        sum_query = _query_block(
            q, g, total, dot, sum_query, key, value, keys, limits, kept, words, num_words, start, rows, begin, length,
            head, pitch, scale, False, DROP, WINDOW, SIZE, WIDE,
        )  # fmt: skip
    for begin in range(edge, high, BLOCK):
        sum_query = _query_block(
            q, g, total, dot, sum_query, key, value, keys, limits, kept, words, num_words, start, rows, begin, length,
            head, pitch, scale, True, DROP, WINDOW, SIZE, WIDE,
        )  # fmt: skip
    _store(of_query, sum_query * scale, start, rows, length, head, 3 * heads * SIZE, SIZE, WIDE)


@triton.jit
def _key_block(
    k, v, sum_key, sum_value, query, gradient, sums, dots, keys, limits, kept, words, num_words, start, columns, begin,
    length, head, heads, pitch, scale, EDGE: tl.constexpr, DROP: tl.constexpr, WINDOW: tl.constexpr,
    SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sums dS^T Q and (P F)^T dO after a further block of queries."""
    rows = begin + tl.arange(0, BLOCK)
    q = _load(query, start, rows, length, head, pitch, EDGE, SIZE, WIDE)
    g = _load(gradient, start, rows, length, head, heads * SIZE, EDGE, SIZE, WIDE)
    total = tl.load(sums + (start + rows) * heads + head, rows < length, other=float("inf"))
    dot = tl.load(dots + (start + rows) * heads + head, rows < length, other=0.0)
    dropped, of_scores = _differentiate(
        q, k, v, g, total, dot, keys, limits, kept, words, num_words, start, rows, columns, length, head, scale,
        EDGE, DROP, WINDOW,
    )  # fmt: skip
    sum_value += tl.dot(tl.trans(dropped).to(g.dtype), g, input_precision="ieee")
    return sum_key + tl.dot(tl.trans(of_scores).to(q.dtype), q, input_precision="ieee"), sum_value


@triton.jit
def backward_keys(
    query, key, value, gradient, sums, dots, bounds, order, keys, limits, kept, words, num_words, scale, heads,
    pitch, of_key, of_value, DROP: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients dK and dV of a block of keys."""
    start, length, columns, low, edge, high = _block(bounds, order, WINDOW)
    head = tl.program_id(1)
    k = _load(key, start, columns, length, head, pitch, True, SIZE, WIDE)
    v = _load(value, start, columns, length, head, pitch, True, SIZE, WIDE)
    sum_key = tl.zeros((BLOCK, WIDE), tl.float32)
    sum_value = tl.zeros((BLOCK, WIDE), tl.float32)
    for begin in range(low, edge, BLOCK):
        sum_key, sum_value = _key_block(
            k, v, sum_key, sum_value, query, gradient, sums, dots, keys, limits, kept, words, num_words, start,
            columns, begin, length, head, heads, pitch, scale, False, DROP, WINDOW, SIZE, WIDE,
        )  # fmt: skip
    for begin in range(edge, high, BLOCK):
        sum_key, sum_value = _key_block(
            k, v, sum_key, sum_value, query, gradient, sums, dots, keys, limits, kept, words, num_words, start,
            columns, begin, length, head, heads, pitch, scale, True, DROP, WINDOW, SIZE, WIDE,
        )  # fmt: skip
    _store(of_key, sum_key * scale, start, columns, length, head, 3 * heads * SIZE, SIZE, WIDE)
    _store(of_value, sum_value, start, columns, length, head, 3 * heads * SIZE, SIZE, WIDE)
