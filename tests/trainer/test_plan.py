"""The order of the stream."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import Row, write_prepared

from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.chunks import rank_plan, read_chunk
from declutr.trainer.data.plan import Plan, permute

seeds = st.integers(0, 2**31)


@given(seeds, st.integers(1, 600), st.integers(0, 2**32 - 1))
def test_each_epoch_is_a_permutation(seed, size, epoch):
    image = permute(seed, np.full(size, epoch), np.arange(size), size)
    assert sorted(image.tolist()) == list(range(size))


@given(seeds, st.integers(1, 2**62), st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=20, unique=True))
def test_huge_sets_stay_one_to_one_and_inside(seed, size, items):
    items = np.unique(np.array(items) % size)
    image = permute(seed, np.zeros(len(items), np.int64), items, size)
    assert len(np.unique(image)) == len(items)
    assert image.min() >= 0
    assert image.max() < size


def test_epochs_and_seeds_differ():
    orders = [permute(seed, np.full(100, epoch), np.arange(100), 100) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all((order != np.arange(100)).any() for order in orders)


def test_plan_order_looks_uniform():
    """Each document is equally likely at each place, over epochs: chi-square with 10 x 10 cells."""
    size, epochs = 10, 4000
    image = permute(3, np.repeat(np.arange(epochs), size), np.tile(np.arange(size), epochs), size)
    counts = np.zeros((size, size))
    np.add.at(counts, (np.tile(np.arange(size), epochs), image), 1)
    assert ((counts - epochs / size) ** 2 / (epochs / size)).sum() < 200  # 81 degrees of freedom: p about 1e-11


plans = st.builds(Plan, seed=seeds, num_documents=st.integers(1, 50), batch_documents=st.integers(1, 20))
corpora = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=2, max_size=4)
mixtures = st.builds(
    lambda seed, batch, some: Plan(
        seed, sum(size for size, _ in some), batch, None, *map(tuple, zip(*some, strict=True))
    ),
    seeds,
    st.integers(1, 20),
    corpora,
)


@given(plans, st.integers(1, 4))
def test_plan_reads_every_document_once_an_epoch(plan, num_epochs):
    steps = -(-plan.num_documents * num_epochs // plan.batch_documents)
    epochs, documents = plan.documents(0, steps)
    assert (np.diff(epochs) >= 0).all()
    for epoch in range(num_epochs):
        assert sorted(documents[epochs == epoch].tolist()) == list(range(plan.num_documents))


@given(plans | mixtures, st.integers(1, 8), st.integers(0, 30), st.integers(1, 5))
def test_any_world_and_any_start_read_the_same_batches(plan, world_size, first_step, num_steps):
    """Ranks' parts, put together in rank order, are the batch; a run that starts late reads what it would have read."""
    whole = np.stack(plan.documents(0, first_step + num_steps)).reshape(2, -1, plan.batch_documents)
    ranks = []
    for rank in range(world_size):
        start, end = plan.slice(rank, world_size)
        part = plan.documents(first_step, first_step + num_steps, start, end)
        ranks.append(np.stack(part).reshape(2, num_steps, end - start))
    assert (np.concatenate(ranks, axis=2) == whole[:, first_step:]).all()


@given(plans | mixtures, st.integers(0, 30), st.integers(0, 10**6))
def test_the_steps_that_read_a_document_are_those_whose_batches_hold_it(plan, last_step, number):
    document = number % plan.num_documents
    epochs, documents = plan.documents(0, last_step)
    places = np.flatnonzero(documents == document)
    found_epochs, steps, positions = plan.reads_of(document, last_step)
    assert found_epochs.tolist() == epochs[places].tolist()
    assert steps.tolist() == (places // plan.batch_documents + 1).tolist()
    assert positions.tolist() == (places % plan.batch_documents).tolist()


@given(st.integers(1, 50), st.integers(1, 20))
def test_plan_ranks_share_evenly(batch_documents, world_size):
    slices = [Plan(0, 100, batch_documents).slice(rank, world_size) for rank in range(world_size)]
    assert slices[0][0] == 0
    assert slices[-1][1] == batch_documents
    assert all(before[1] == after[0] for before, after in pairwise(slices))
    sizes = [end - start for start, end in slices]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("epochs", "steps"), [(1, 4), (2, 7), (0.5, 2), (0.01, 1)])
def test_plan_of_epochs_has_their_steps(epochs, steps):
    assert Plan(seed=0, num_documents=10, batch_documents=3).steps_in(epochs) == steps


def test_a_later_run_reads_shards_that_were_prepared_again_in_the_same_folder(tmp_path):
    folder, read = tmp_path / "data", []
    for word in ("first", "second"):
        shutil.rmtree(folder, ignore_errors=True)
        rows = [Row(" ".join(f"{word}{number}x{place % 7}" for place in range(60)), "train") for number in range(4)]
        write_prepared(folder, [rows])
        shards = ShardSet(folder, "train")
        chunk = read_chunk({"id": np.zeros(1, np.int64)}, rank_plan(Plan(0, 4, 4), shards, 0, 1, 0, 1), 0)
        assert sorted(chunk.column("id").to_pylist()) == sorted(shards.take(np.arange(4)).column("id").to_pylist())
        read.append(set(chunk.column("id").to_pylist()))
    assert not read[0] & read[1]
