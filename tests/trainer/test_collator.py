"""From the order of the stream to span batches and their masks."""

import dataclasses
import shutil

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


def test_plan_order_differs_with_epoch_and_seed_and_looks_uniform():
    """Each document is equally likely at each place, over epochs: chi-square with 10 x 10 cells."""
    orders = [permute(seed, np.full(100, epoch), np.arange(100), 100) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all((order != np.arange(100)).any() for order in orders)
    size, epochs = 10, 4000
    image = permute(3, np.repeat(np.arange(epochs), size), np.tile(np.arange(size), epochs), size)
    counts = np.zeros((size, size))
    np.add.at(counts, (np.tile(np.arange(size), epochs), image), 1)
    assert ((counts - epochs / size) ** 2 / (epochs / size)).sum() < 200  # 81 degrees of freedom: p about 1e-11
    plan = Plan(seed=0, num_documents=10, batch_documents=3)
    assert [plan.steps_in(epochs) for epochs in (1, 2, 0.5, 0.01)] == [4, 7, 2, 1]


plans = st.builds(Plan, seed=seeds, num_documents=st.integers(1, 50), batch_documents=st.integers(1, 20))
mixtures = st.builds(
    lambda seed, batch, corpora: Plan(seed, sum(size for size, _ in corpora), batch, None, *zip(*corpora, strict=True)),
    seeds, st.integers(1, 20), st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=2, max_size=4),
)  # fmt: skip


@given(plans, st.integers(1, 4))
def test_plan_reads_every_document_once_an_epoch(plan, num_epochs):
    steps = -(-plan.num_documents * num_epochs // plan.batch_documents)
    epochs, documents = plan.documents(0, steps)
    assert (np.diff(epochs) >= 0).all()
    for epoch in range(num_epochs):
        assert sorted(documents[epochs == epoch].tolist()) == list(range(plan.num_documents))


@given(plans | mixtures, st.integers(1, 8), st.integers(0, 30), st.integers(1, 5), st.integers(0, 10**6))
def test_any_world_and_any_start_read_the_same_batches_in_which_each_document_is_found(
    plan, world_size, first_step, num_steps, number
):
    """Ranks' parts, put together in rank order, are the batch; a run that starts late reads what it would have read."""
    last_step, document = first_step + num_steps, number % plan.num_documents
    epochs, documents = plan.documents(0, last_step)
    whole = np.stack([epochs, documents]).reshape(2, -1, plan.batch_documents)
    ranks = []
    for rank in range(world_size):
        start, end = plan.slice(rank, world_size)
        part = plan.documents(first_step, last_step, start, end)
        ranks.append(np.stack(part).reshape(2, num_steps, end - start))
    assert (np.concatenate(ranks, axis=2) == whole[:, first_step:]).all()
    sizes = [part.shape[2] for part in ranks]
    assert max(sizes) - min(sizes) <= 1
    places = np.flatnonzero(documents == document)
    expected = epochs[places], places // plan.batch_documents + 1, places % plan.batch_documents
    assert all(map(np.array_equal, plan.reads_of(document, last_step), expected))


def test_a_later_run_reads_shards_that_were_prepared_again_in_the_same_folder(tmp_path):
    folder, read = tmp_path / "data", []
    for word in ("first", "second"):
        shutil.rmtree(folder, ignore_errors=True)
        rows = [Row(" ".join(f"{word}{number}x{place % 7}" for place in range(60)), "train") for number in range(4)]
        write_prepared(folder, [rows])
        shards = ShardSet(folder, "train")
        chunk = read_chunk({"id": np.zeros(1, np.int64)}, rank_plan(Plan(0, 4, 4), shards, 0, 1, 0, 1), 0)
        read += (ids := chunk.column("id").to_pylist())
        assert sorted(ids) == sorted(shards.take(np.arange(4)).column("id").to_pylist())
    assert len(set(read)) == 8


LENGTHS = [48, 70, 49, 131, 60]
NO_MASKS = DeclutrConfig(terms="contrastive")
HALF_MASKED = DeclutrConfig(masking={"mlm_probability": 0.5})


def rows(batch):
    return [part.tolist() for part in batch.input_ids.split(batch.lengths.tolist())]


def test_order_cut_and_specials_of_whole_and_chunked_tables():
    collator, table, epochs = tiny_collator(NO_MASKS), documents(LENGTHS, 12), np.array([0, 0, 1, 1, 2])
    batch = collator.collate(table, epochs).spans
    spans, texts, expected = collator.sample(table, epochs), table.column("tokens").to_pylist(), []
    for bounds in (spans.anchors, spans.positives):  # cut and wrapped, the slow way
        for text, row in zip(texts, bounds, strict=True):
            contents = (text[start:end][: collator.max_content] for start, end in row.reshape(-1, 2))
            expected += [[VOCABULARY.bos, *content, VOCABULARY.eos] for content in contents]
    assert rows(batch) == expected
    assert batch.lengths.tolist() == [len(row) for row in expected]
    assert max(map(len, expected)) == collator.max_content + 2
    assert min(map(len, expected)) < collator.max_content + 2
    assert len(batch.selected) == len(batch.labels) == 0
    bare = Vocabulary(size=64, bos=None, eos=None, mask=63, special=(63,))  # without specials, plain tokens are packed
    plain = type(collator)(**{**vars(collator), "vocabulary": bare}).collate(table, epochs).spans
    assert [row[1:-1] for row in expected] == rows(plain)
    chunked = pa.concat_tables([table.slice(0, 2), table.slice(2, 1), table.slice(3)])
    assert chunked.column("id").num_chunks == 3
    assert rows(collator.collate(chunked, epochs).spans) == expected


def test_masks_lie_on_anchors_alone_are_restored_by_labels_and_keyed_by_document_epoch_anchor_and_place():
    collator, plain, table = tiny_collator(HALF_MASKED), tiny_collator(NO_MASKS), documents(LENGTHS, 12)
    epochs = np.array([0, 1, 0, 7, 3])
    masked, original = collator.collate(table, epochs).spans, plain.collate(table, epochs).spans
    assert len(masked.selected) > 0
    assert int(masked.selected.max()) < int(masked.lengths[: 5 * 2].sum())
    changed = (masked.input_ids != original.input_ids).nonzero()[:, 0]
    assert set(changed.tolist()) <= set(masked.selected.tolist())
    assert torch.equal(original.input_ids[masked.selected], masked.labels)
    assert not torch.isin(masked.labels, torch.tensor(VOCABULARY.special)).any()
    assert (masked.input_ids == VOCABULARY.mask).sum() > 0.6 * len(masked.selected)
    keys = [int.from_bytes(name[:8], "little") for name in table.column("id").to_pylist()]
    for number, (row, content) in enumerate(zip(rows(masked)[:10], rows(original), strict=False)):
        (document, anchor), content = divmod(number, 2), np.array(content[1:-1])
        key, epoch = (np.full(len(content), values[document], np.uint64) for values in (keys, epochs))
        columns = (content, key, epoch, np.full(len(content), anchor), np.arange(len(content)))
        expected, _ = mask(dict(zip(COLUMNS, columns, strict=True)), HALF_MASKED.masking)
        assert row[1:-1] == expected.tolist()


def test_terms_and_unmasked_anchors_decide_which_spans_are_packed():
    """Unmasked anchors are the originals; MLM alone has no positives."""
    table, epochs = documents(LENGTHS, 12), np.zeros(5, np.int64)
    configs = HALF_MASKED, NO_MASKS, DeclutrConfig(**EVERY["unmasked anchors"]), DeclutrConfig(**EVERY["mlm"])
    masked, original, unmasked, only = (tiny_collator(config).collate(table, epochs).spans for config in configs)
    assert rows(unmasked) == rows(masked)[:10] + rows(original)
    assert rows(only) == rows(masked)[:10]
    assert torch.equal(only.labels, masked.labels)


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

    def digest(**tensors):
        return dataclasses.replace(whole, **tensors).digest()

    for name, place in (("input_ids", 4), ("labels", 0), ("keys", 1), ("selected", -1)):
        values = getattr(whole, name).clone()
        values[place] += 1
        assert digest(**{name: values}) != whole.digest(), name
    token, label, place = whole.input_ids.clone(), whole.labels.clone(), whole.selected[0]
    assert token[place] != label[0]
    token[place], label[0] = whole.labels[0], whole.input_ids[place]
    assert digest(input_ids=token, labels=label) != whole.digest(), "exchanged"


COLUMNS = ("ids", "key", "epoch", "anchor", "place")


def tokens():
    rng = np.random.default_rng(0)
    key, epoch = (rng.integers(0, end, 400, dtype=np.uint64) for end in (2**64, 2**32))
    ids, anchor, place = (rng.integers(0, end, 400) for end in (VOCABULARY.size, 64, 512))
    return dict(zip(COLUMNS, (ids, key, epoch, anchor, place), strict=True))


def mask(columns, config=None, seed=0):
    config = config or MaskingConfig(mlm_probability=0.5)
    return mask_tokens(config, seed, VOCABULARY, *(columns[name] for name in COLUMNS))


@pytest.mark.parametrize("changed", ["seed", *COLUMNS[1:]])
def test_masks_depend_on_every_coordinate(changed):
    columns = tokens() | {"ids": np.full(400, 7)}
    _, selected = mask(columns)
    if changed != "seed":
        columns |= {changed: columns[changed] + columns[changed].dtype.type(1)}
    _, other = mask(columns, seed=int(changed == "seed"))
    assert 140 < (selected != other).sum() < 260  # 200 expected, 6 standard deviations


def test_shares_at_their_ends():
    names, ids = ("mlm_probability", "mask_replace_prob", "random_replace_prob"), tokens()["ids"]
    for shares, kinds in (
        ((0.0, 0.8, 0.1), set()),
        ((1.0, 1.0, 0.0), {"mask"}),
        ((1.0, 0.0, 0.0), {"kept"}),
        ((1.0, 0.0, 1.0), {"kept", "mask", "other"}),
    ):
        masked, selected = mask(tokens(), MaskingConfig(**dict(zip(names, shares, strict=True))))
        assert (selected == (~np.isin(ids, VOCABULARY.special) & (shares[0] == 1.0))).all()
        outcomes = np.where(masked == ids, "kept", np.where(masked == VOCABULARY.mask, "mask", "other"))
        assert set(outcomes[selected]) == kinds


OBJECTIVES = {name: values for name, values in EVERY.items() if name != "by name"}


def collator_for(mode, objective, num_anchors=2):
    spans = SpanConfig(num_anchors=num_anchors, num_positives=2, min_tokens=3, max_tokens=12)
    return tiny_collator(DeclutrConfig(**objective), spans, mode=mode)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
def test_a_document_with_room_for_one_anchor_gives_the_batch_of_one_anchor(objective):
    one_anchor, two = (collator_for("fewer_anchors", objective, number) for number in (1, 2))
    table = documents(SHORT_LENGTHS["fewer_anchors"], 12, mode="fewer_anchors")
    fields = ("input_ids", "lengths", "selected", "labels", "keys")
    for row, count in enumerate([1, 2, 1, 2, 1]):
        pair = [collator.collate(table.slice(row, 1), np.zeros(1, np.int64)).spans for collator in (one_anchor, two)]
        assert all(torch.equal(*(getattr(spans, name) for spans in pair)) for name in fields) == (count == 1)
    everything = two.collate(table, np.zeros(5, np.int64)).spans
    assert everything.num_spans == 7 + 7 * two.config.unmasked_anchors + 14 * two.config.embeds


@pytest.mark.parametrize("mode", ["fewer_anchors", "shrink_spans"])
def test_the_loss_is_that_of_all_documents_views_and_spans_of_other_documents_are_refused(mode):
    encoder = tiny_encoder(dropout=0.2, projection={"kind": "mlp", "size": 6})
    table = documents(SHORT_LENGTHS[mode], 12, mode=mode)
    collator = collator_for(mode, OBJECTIVES["unmasked anchors"])
    batch, train_step = rank_batch(collator, table), tiny_train_step(encoder, collator.config)
    [gradients] = train_step.gradients({"": batch}, 1)
    objective = train_step.tasks[0].objective
    batches = [collator.collate(table.slice(row, 1), np.zeros(1, np.int64)) for row in range(5)]
    views = [objective.views(encoder(alone.spans)[0], alone) for alone in batches]
    assert [len(view) for view in views] == ([1, 2, 1, 2, 1] if mode == "fewer_anchors" else [2] * 5)
    expected = contrastive(objective, torch.cat(views))
    assert deviation([gradients.terms["contrastive"]], [expected]) < 1e-10
    spans = encoder(batch.spans)[0]
    assert len(objective.views(spans, batch)) == batch.num_rows == (7 if mode == "fewer_anchors" else 10)
    for rows in (batch.num_rows - 1, batch.num_rows + 1):
        with pytest.raises(ValueError, match=all_of(f"{len(spans)} spans", f"{rows} anchors", "4 spans")):
            objective.views(spans, rows_of(spans, rows))
