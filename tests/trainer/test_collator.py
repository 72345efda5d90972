"""From the order of the stream to span batches and their masks."""

import dataclasses
import shutil
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measures import deviation
from messages import all_of
from prepared import Row, write_prepared
from tiny import OBJECTIVES as EVERY
from tiny import (
    SHORT_LENGTHS,
    VOCABULARY,
    contrastive,
    documents,
    rank_batch,
    rows_of,
    tiny_collator,
    tiny_encoder,
    tiny_train_step,
)

from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.chunks import rank_plan, read_chunk
from declutr.trainer.data.packedbatch import DIGEST
from declutr.trainer.data.packing import MaskingConfig, Vocabulary, mask_tokens
from declutr.trainer.data.plan import Plan, permute
from declutr.trainer.objectives.config import SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig

seeds = st.integers(0, 2**31)


@given(seeds, st.integers(1, 2**62), st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=20, unique=True))
def test_huge_sets_stay_one_to_one_and_inside(seed, size, items):
    items = np.unique(np.array(items) % size)
    image = permute(seed, np.zeros(len(items), np.int64), items, size)
    assert len(np.unique(image)) == len(items)
    assert image.min() >= 0
    assert image.max() < size
    assert (permute(seed, np.zeros(len(items), np.int64), image, size, inverse=True) == items).all()


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


LENGTHS = [48, 70, 49, 131, 60]
NO_MASKS = DeclutrConfig(terms="contrastive")
HALF_MASKED = DeclutrConfig(masking={"mlm_probability": 0.5})


def rows(batch):
    return [part.tolist() for part in batch.input_ids.split(batch.lengths.tolist())]


def expected_rows(collator, table, epochs):
    """Anchors then positives of every document, cut and wrapped, the slow way."""
    spans, rows_ = collator.sample(table, epochs), [[], []]
    tokens = table.column("tokens").to_pylist()
    for row, text in enumerate(tokens):
        for kind, found in enumerate((spans.anchors[row], spans.positives[row])):
            for start, end in found.reshape(-1, 2):
                content = text[start:end][: collator.max_content]
                rows_[kind].append([VOCABULARY.bos, *content, VOCABULARY.eos])
    return rows_[0] + rows_[1]


def test_order_cut_and_specials():
    collator, table, epochs = tiny_collator(NO_MASKS), documents(LENGTHS, 12), np.array([0, 0, 1, 1, 2])
    batch = collator.collate(table, epochs).spans
    expected = expected_rows(collator, table, epochs)
    assert rows(batch) == expected
    assert batch.lengths.tolist() == [len(row) for row in expected]
    assert max(map(len, expected)) == collator.max_content + 2
    assert min(map(len, expected)) < collator.max_content + 2
    assert len(batch.selected) == len(batch.labels) == 0


def test_collator_without_specials_packs_plain_tokens():
    vocabulary = Vocabulary(size=64, bos=None, eos=None, mask=63, special=(63,))
    whole, bare = tiny_collator(NO_MASKS), tiny_collator(NO_MASKS)
    bare = type(bare)(**{**vars(bare), "vocabulary": vocabulary})
    table, epochs = documents(LENGTHS, 12), np.zeros(5, np.int64)
    assert [row[1:-1] for row in rows(whole.collate(table, epochs).spans)] == rows(bare.collate(table, epochs).spans)


def test_masks_lie_on_anchors_alone_and_labels_restore_them():
    collator, plain, table = tiny_collator(HALF_MASKED), tiny_collator(NO_MASKS), documents(LENGTHS, 12)
    epochs = np.zeros(5, np.int64)
    masked, original = collator.collate(table, epochs).spans, plain.collate(table, epochs).spans
    anchors_end = int(masked.lengths[: 5 * 2].sum())
    assert len(masked.selected) > 0
    assert int(masked.selected.max()) < anchors_end
    changed = (masked.input_ids != original.input_ids).nonzero()[:, 0]
    assert set(changed.tolist()) <= set(masked.selected.tolist())
    assert torch.equal(original.input_ids[masked.selected], masked.labels)
    assert not torch.isin(masked.labels, torch.tensor(VOCABULARY.special)).any()
    assert (masked.input_ids == VOCABULARY.mask).sum() > 0.6 * len(masked.selected)


def test_masks_are_keyed_by_document_epoch_anchor_and_place():
    collator, plain, table = tiny_collator(HALF_MASKED), tiny_collator(NO_MASKS), documents(LENGTHS, 12)
    epochs = np.array([0, 1, 0, 7, 3])
    keys = [int.from_bytes(name[:8], "little") for name in table.column("id").to_pylist()]
    masked, original = rows(collator.collate(table, epochs).spans), rows(plain.collate(table, epochs).spans)
    for number in range(10):
        document, anchor = divmod(number, 2)
        content = np.array(original[number][1:-1])
        size = len(content)
        columns = (
            *(np.full(size, values[document], np.uint64) for values in (keys, epochs)),
            np.full(size, anchor),
            np.arange(size),
        )
        expected, _ = mask(dict(zip(COLUMNS, (content, *columns), strict=True)), HALF_MASKED.masking)
        assert masked[number][1:-1] == expected.tolist()


def test_terms_and_unmasked_anchors_decide_which_spans_are_packed():
    """Unmasked anchors are the originals; MLM alone has no positives."""
    table, epochs = documents(LENGTHS, 12), np.zeros(5, np.int64)
    settings = {"masking": {"mlm_probability": 0.5}}
    configs = (
        HALF_MASKED,
        NO_MASKS,
        *(DeclutrConfig(**settings, **more) for more in ({"contrast_unmasked_anchors": True}, {"terms": "mlm"})),
    )
    masked, original, unmasked, only = (tiny_collator(config).collate(table, epochs).spans for config in configs)
    assert rows(unmasked) == rows(masked)[:10] + rows(original)
    assert rows(only) == rows(masked)[:10]
    assert torch.equal(only.labels, masked.labels)


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 5))
def test_ranks_batches_hold_the_global_batchs_spans(cuts, epoch):
    """However the documents are shared out (also none to some), each brings the same spans and masks."""
    collator, table = tiny_collator(HALF_MASKED), documents(LENGTHS, 12)
    bounds = [0, *sorted(cuts), len(LENGTHS)]
    whole = rank_batch(collator, table, epoch=epoch).spans
    parts = [rank_batch(collator, table, a, b, epoch).spans for a, b in pairwise(bounds)]
    counts = [(b - a) * 2 for a, b in pairwise(bounds)]
    pairs = [(rows(part)[:count], rows(part)[count:]) for part, count in zip(parts, counts, strict=True)]
    assert [row for kind in zip(*pairs, strict=True) for some in kind for row in some] == rows(whole)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)


def test_chunked_tables_read_like_whole_ones():
    collator, table = tiny_collator(), documents(LENGTHS, 12)
    chunked = pa.concat_tables([table.slice(0, 2), table.slice(2, 1), table.slice(3)])
    assert chunked.column("id").num_chunks == 3
    epochs = np.zeros(5, np.int64)
    assert rows(collator.collate(chunked, epochs).spans) == rows(collator.collate(table, epochs).spans)


def test_microbatches_cut_between_spans():
    batch = rank_batch(tiny_collator(HALF_MASKED), documents(LENGTHS, 12)).spans
    for limit in (1, 12, 30, 10_000):
        pieces = batch.microbatches(limit)
        assert all(piece.num_tokens <= limit or piece.num_spans == 1 for piece in pieces)
        for name in ("input_ids", "lengths", "keys", "labels"):
            assert torch.equal(torch.cat([getattr(piece, name) for piece in pieces]), getattr(batch, name)), name
        shifts = np.cumsum([0] + [piece.num_tokens for piece in pieces])
        selected = torch.cat([piece.selected + int(s) for piece, s in zip(pieces, shifts, strict=False)])
        assert torch.equal(selected, batch.selected)


def test_the_digest_adds_up_over_ranks_and_knows_documents_tokens_masks_and_epochs():
    collator, table, epochs = tiny_collator(HALF_MASKED), documents(LENGTHS, 12), np.array([0, 1, 0, 7, 3])
    whole = collator.collate(table, epochs).spans
    parts = [collator.collate(table.slice(a, b - a), epochs[a:b]).spans for a, b in ((0, 2), (2, 2), (2, 5))]
    assert sum(part.digest() for part in parts) % DIGEST == whole.digest()
    assert collator.collate(table, epochs + 1).spans.digest() != whole.digest()
    assert collator.collate(table.take([1, 0, 2, 3, 4]), epochs).spans.digest() != whole.digest()
    for changed, place in (("input_ids", 4), ("labels", 0), ("keys", 1)):
        values = getattr(whole, changed).clone()
        values[place] += 1
        assert dataclasses.replace(whole, **{changed: values}).digest() != whole.digest(), changed
    token, label = whole.input_ids.clone(), whole.labels.clone()
    place = whole.selected[0]
    assert token[place] != label[0]
    token[place], label[0] = whole.labels[0], whole.input_ids[place]
    assert dataclasses.replace(whole, input_ids=token, labels=label).digest() != whole.digest(), "exchanged"
    moved = whole.selected.clone()
    moved[-1] += 1
    assert dataclasses.replace(whole, selected=moved).digest() != whole.digest()


COLUMNS = ("ids", "key", "epoch", "anchor", "place")


def tokens(count=400):
    rng = np.random.default_rng(0)
    return {
        "ids": rng.integers(0, VOCABULARY.size, count),
        "key": rng.integers(0, 2**64, count, dtype=np.uint64),
        "epoch": rng.integers(0, 2**32, count, dtype=np.uint64),
        "anchor": rng.integers(0, 64, count),
        "place": rng.integers(0, 512, count),
    }


def mask(given, config=None, seed=0):
    config = config or MaskingConfig(mlm_probability=0.5)
    return mask_tokens(config, seed, VOCABULARY, *(given[name] for name in COLUMNS))


@pytest.mark.parametrize("changed", ["seed", *COLUMNS[1:]])
def test_masks_depend_on_every_coordinate(changed):
    """Another seed, document, epoch, anchor or place: independent draws, so half of the choices differ."""
    given = tokens()
    given["ids"] = np.full(400, 7)
    _, selected = mask(given)
    if changed != "seed":
        given = given | {changed: given[changed] + given[changed].dtype.type(1)}
    _, other = mask(given, seed=int(changed == "seed"))
    assert 140 < (selected != other).sum() < 260  # 200 expected, 6 standard deviations


@pytest.mark.parametrize(
    ("shares", "kinds"),
    [
        ({"mlm_probability": 0.0}, set()),
        ({"mlm_probability": 1.0, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}, {"mask"}),
        ({"mlm_probability": 1.0, "mask_replace_prob": 0.0, "random_replace_prob": 0.0}, {"kept"}),
        ({"mlm_probability": 1.0, "mask_replace_prob": 0.0, "random_replace_prob": 1.0}, {"kept", "mask", "other"}),
    ],
)
def test_shares_at_their_ends(shares, kinds):
    given = tokens()
    masked, selected = mask(given, MaskingConfig(**shares))
    special = np.isin(given["ids"], VOCABULARY.special)
    assert (selected == (~special & (shares["mlm_probability"] == 1.0))).all()
    found = np.where(masked == given["ids"], "kept", np.where(masked == VOCABULARY.mask, "mask", "other"))
    assert set(found[selected]) == kinds


MODES = ("fewer_anchors", "shrink_spans")
OBJECTIVES = {name: values for name, values in EVERY.items() if name != "by name"}


def shard_rows(mode, row=None):
    """Documents as `prepare` leaves them in this mode, or one of them."""
    table = documents(SHORT_LENGTHS[mode], 12, mode=mode)
    return table if row is None else table.slice(row, 1)


def collator_for(mode, objective, num_anchors=2):
    spans = SpanConfig(num_anchors=num_anchors, num_positives=2, min_tokens=3, max_tokens=12)
    return tiny_collator(DeclutrConfig(**objective), spans, mode=mode)


def same(found, expected):
    fields = ("input_ids", "lengths", "selected", "labels", "keys")
    return all(torch.equal(getattr(found, name), getattr(expected, name)) for name in fields)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
def test_a_document_with_room_for_one_anchor_gives_the_batch_of_one_anchor(objective):
    """Tokens, masks and dropout: whatever is not there takes nothing from what is."""
    one, two = (collator_for("fewer_anchors", objective, number) for number in (1, 2))
    for row, count in enumerate([1, 2, 1, 2, 1]):
        table = shard_rows("fewer_anchors", row)
        expected = one.collate(table, np.zeros(1, np.int64)).spans
        assert same(two.collate(table, np.zeros(1, np.int64)).spans, expected) == (count == 1)
    everything = two.collate(shard_rows("fewer_anchors"), np.zeros(5, np.int64)).spans
    kinds = [7] + [7] * two.config.unmasked_anchors + [14] * two.config.embeds
    assert everything.num_spans == sum(kinds)


def setup(mode, objective):
    encoder = tiny_encoder(dropout=0.2, projection={"kind": "mlp", "size": 6})
    batch = rank_batch(collator_for(mode, objective), shard_rows(mode))
    return tiny_train_step(encoder, DeclutrConfig(**objective)), batch


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_that_of_all_documents_views(mode):
    """Each document's views, made alone, one after the other: the order and number of pairs in the global loss."""
    train_step, batch = setup(mode, OBJECTIVES["unmasked anchors"])
    [found] = train_step.gradients({"": batch}, 1)
    collator, objective = collator_for(mode, OBJECTIVES["unmasked anchors"]), train_step.tasks[0].objective
    batches = [collator.collate(shard_rows(mode, row), np.zeros(1, np.int64)) for row in range(5)]
    views = [objective.views(train_step.encoder(alone.spans)[0], alone) for alone in batches]
    assert [len(view) for view in views] == ([1, 2, 1, 2, 1] if mode == "fewer_anchors" else [2] * 5)
    expected = contrastive(objective, torch.cat(views))
    assert deviation([found.terms["contrastive"]], [expected]) < 1e-10


def test_spans_of_other_documents_are_refused():
    train_step, batch = setup("fewer_anchors", OBJECTIVES["both"])
    spans = train_step.encoder(batch.spans)[0]
    assert len(train_step.tasks[0].objective.views(spans, batch)) == batch.num_rows == 7
    for rows in (6, 8):
        with pytest.raises(ValueError, match=all_of("21 spans", f"{rows} anchors", "3 spans")):
            train_step.tasks[0].objective.views(spans, rows_of(spans, rows))
