"""NT-Xent in tiles against the whole matrix at once."""

import pytest
import torch
import torch.nn.functional as F
from measures import deviation
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from declutr.trainer.objectives.declutr.ntxent import ntxent
from declutr.trainer.objectives.row_shard import tile_rows

TILE_ROWS = tile_rows(torch.device("cpu"))
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}


def dense(embeddings, temperature, queue=None):
    """The formula, with every score in one matrix."""
    rows = F.normalize(embeddings, dim=-1)
    others = rows if queue is None else torch.cat([rows, F.normalize(queue, dim=-1)])
    scores = rows @ others.T / temperature
    partner = torch.arange(len(rows)).roll(len(rows) // 2)[:, None]
    positive = scores.gather(1, partner)[:, 0]
    left_out = torch.zeros_like(scores, dtype=torch.bool).scatter(1, partner, True).fill_diagonal_(True)
    negatives = scores.masked_fill(left_out, torch.finfo(scores.dtype).min).logsumexp(dim=1)
    return -F.logsigmoid(positive - negatives).mean()


def embeddings(pairs, size=12, dtype=torch.float64, seed=0):
    """Pairs that resemble each other, so that terms are neither all won nor all lost."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randn(pairs, size, generator=generator, dtype=torch.float64)
    noise = torch.randn(pairs, size, generator=generator, dtype=torch.float64)
    return torch.cat([anchors, anchors + 1.5 * noise]).to(dtype).requires_grad_(True)


def value_and_gradient(loss, rows, *arguments):
    value = loss(rows, *arguments)
    (gradient,) = torch.autograd.grad(value, rows)
    return value, gradient


def test_a_pair_without_negatives_is_won_and_pulls_nothing():
    value, gradient = value_and_gradient(ntxent, embeddings(1), 0.05)
    assert value.item() == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("temperature", [0.5, 0.05, 5e-4])
@pytest.mark.parametrize("queued", [0, 1, 23])
@pytest.mark.parametrize("dtype", LIMITS)
def test_any_tile_gives_the_dense_value_and_gradient(dtype, queued, temperature):
    """Tiles of 38 rows: of one row, ragged at the end, cutting at M and beside it, and one for all."""
    rows = embeddings(19, dtype=dtype)
    queue = embeddings(queued, seed=1, dtype=dtype).detach()[:queued]
    exact = embeddings(19, dtype=dtype).detach().double().requires_grad_(True)
    expected = value_and_gradient(dense, exact, temperature, queue.double())
    # A rounding by eps of a cosine moves a logit by eps / t: float32 cannot promise 1e-5 of a gradient at 5e-4.
    allowed = LIMITS[dtype] * (1.0 if dtype == torch.float64 else max(1.0, 0.005 / temperature))
    for tile in (1, 3, 7, 16, 18, 19, 20, 37, 38, 39, TILE_ROWS):
        value, gradient = value_and_gradient(ntxent, rows, temperature, queue, tile)
        assert value.dtype == gradient.dtype == dtype
        assert deviation([value], [expected[0]]) < LIMITS[dtype]
        assert deviation([gradient], [expected[1]]) < allowed


def without_own_document(rows, temperature, queue, documents, queue_documents):
    """The loss of each row by a loop over the scores that are in its denominator."""
    rows, queue = F.normalize(rows, dim=-1), F.normalize(queue, dim=-1)
    pairs, terms = len(rows) // 2, []
    for i, row in enumerate(rows):
        partner = (i + pairs) % (2 * pairs)
        kept = [rows[k] for k in range(2 * pairs) if documents[k % pairs] != documents[i % pairs]]
        kept += [each for each, owner in zip(queue, queue_documents, strict=True) if owner != documents[i % pairs]]
        scores = torch.stack([row @ each for each in [rows[partner], *kept]]) / temperature
        terms.append(scores.logsumexp(0) - scores[0])
    return torch.stack(terms).mean()


@pytest.mark.parametrize("tile", [1, 3, 7, 19, 20, TILE_ROWS])
def test_ntxent_excluding_same_document_equals_a_plain_writing(tile):
    """Documents of one to four anchors, of which some are in the queue too; keys use all 64 bits."""
    rows, queue = embeddings(19), embeddings(12, seed=1).detach()[:23]
    documents = torch.randint(-4, 5, (19,), generator=torch.Generator().manual_seed(0)) << 60
    queue_documents = torch.randint(-8, 9, (23,), generator=torch.Generator().manual_seed(1)) << 60
    assert len(documents.unique()) < 10
    expected = value_and_gradient(without_own_document, rows, 0.2, queue, documents, queue_documents)
    found = value_and_gradient(
        lambda given: ntxent(given, 0.2, queue, tile, documents=documents, queue_documents=queue_documents), rows
    )
    assert deviation(found, expected) < 1e-10
    alone = value_and_gradient(lambda given: ntxent(given, 0.2, None, tile, documents=torch.zeros(19)), rows)
    assert alone[0] == 0  # one document alone: nothing is left to tell apart
    assert not alone[1].any()


def test_ntxent_of_several_default_tiles_equals_the_dense_one():
    rows = embeddings(TILE_ROWS // 2 + 100)
    found, expected = value_and_gradient(ntxent, rows, 0.05), value_and_gradient(dense, rows, 0.05)
    assert deviation([found[0]], [expected[0]]) < 1e-10
    assert deviation([found[1]], [expected[1]]) < 1e-10


@pytest.mark.parametrize("tile", [1, TILE_ROWS])
def test_ntxent_of_one_pair_without_a_queue_is_zero(tile):
    """Without a negative there is nothing to learn; with a queue its embeddings are the negatives."""
    rows = embeddings(1)
    value, gradient = value_and_gradient(ntxent, rows, 0.05, None, tile)
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(rows))
    queue = embeddings(3, seed=1).detach()
    expected = value_and_gradient(dense, rows, 0.05, queue)
    assert deviation(value_and_gradient(ntxent, rows, 0.05, queue, tile), expected) < 1e-10


def test_lost_and_won_terms_keep_their_digits():
    """At 5e-4 a lost term is in the thousands, a won one underflows: both exact, no gradient is NaN."""
    anchors = torch.eye(6, 8, dtype=torch.float64)
    for positives in (anchors, -anchors, anchors.roll(1, 0)):
        rows = torch.cat([anchors, positives]).float().requires_grad_(True)
        exact = rows.detach().double().requires_grad_(True)
        value, gradient = value_and_gradient(ntxent, rows, 5e-4, None, 5)
        expected = value_and_gradient(dense, exact, 5e-4)
        assert torch.allclose(value.double(), expected[0], rtol=1e-5)
        assert torch.isfinite(gradient).all()
        assert torch.allclose(gradient.double(), expected[1], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("tile", [3, 16])
def test_gradient_is_the_derivative(tile):
    queue = embeddings(2, size=4, seed=1).detach()
    rows = embeddings(4, size=4)
    assert torch.autograd.gradcheck(lambda given: ntxent(given, 0.3, queue, tile), [rows])


def test_queue_has_no_gradient():
    queue = embeddings(3, seed=1)
    ntxent(embeddings(4), 0.05, queue).backward()
    assert queue.grad is None


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, backward included."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [leaf.untyped_storage().nbytes() // leaf.element_size() for leaf in tree_leaves(result)
                if isinstance(leaf, torch.Tensor)]  # fmt: skip
        self.elements = max([self.elements, *made])
        return result


@pytest.mark.parametrize("queued", [0, 300])
def test_no_matrix_beyond_a_tile(queued):
    pairs, tile = 200, 32
    rows, queue = embeddings(pairs, size=4), embeddings(queued, size=4, seed=1).detach()[:queued]
    with Largest() as seen:
        ntxent(rows, 0.05, queue, tile).backward()
    assert seen.elements == max(tile * tile, rows.numel(), queue.numel())
    with Largest() as whole:
        dense(rows, 0.05, queue).backward()
    assert whole.elements >= (2 * pairs) ** 2  # the measure sees what is there


def test_autocast_in_the_backward_pass_changes_nothing():
    rows = embeddings(9, dtype=torch.float32)
    (plain,) = torch.autograd.grad(ntxent(rows, 0.05), rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (low,) = torch.autograd.grad(ntxent(rows, 0.05), rows)
    assert torch.equal(plain, low)


def test_half_precision_embeddings_are_normalised_and_compared_in_float32():
    """The embeddings are those that autocast computed; the loss is that of the same numbers in float32."""
    half = embeddings(19, dtype=torch.bfloat16)
    queue = embeddings(8, seed=1, dtype=torch.bfloat16).detach()
    exact = half.detach().float().requires_grad_(True)
    value, gradient = value_and_gradient(ntxent, half, 0.05, queue)
    expected, wanted = value_and_gradient(ntxent, exact, 0.05, queue.float())
    assert value.dtype == torch.float32
    assert value == expected
    assert torch.equal(gradient, wanted.bfloat16())
