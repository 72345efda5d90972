"""Documents to span batches."""

import dataclasses
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import all_of
from tiny import VOCABULARY, documents, rank_batch, tiny_collator

from declutr.trainer.data.packedbatch import DIGEST
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.masking import mask_tokens
from declutr.trainer.objectives.span_config import SpanConfig

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
    batch = collator.batch(table, epochs)
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
    assert [row[1:-1] for row in rows(whole.batch(table, epochs))] == rows(bare.batch(table, epochs))


def test_masks_lie_on_anchors_alone_and_labels_restore_them():
    collator, plain, table = tiny_collator(HALF_MASKED), tiny_collator(NO_MASKS), documents(LENGTHS, 12)
    epochs = np.zeros(5, np.int64)
    masked, original = collator.batch(table, epochs), plain.batch(table, epochs)
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
    masked, original = rows(collator.batch(table, epochs)), rows(plain.batch(table, epochs))
    for number in range(10):
        document, anchor = divmod(number, 2)
        content = np.array(original[number][1:-1])
        size = len(content)
        expected, _ = mask_tokens(
            HALF_MASKED.masking,
            0,
            content,
            np.full(size, keys[document], np.uint64),
            np.full(size, epochs[document], np.uint64),
            np.full(size, anchor),
            np.arange(size),
            VOCABULARY.size,
            VOCABULARY.mask,
            np.array(VOCABULARY.special),
        )
        assert masked[number][1:-1] == expected.tolist()


def test_unmasked_anchors_are_the_originals():
    settings_ = {"masking": {"mlm_probability": 0.5}, "contrast_unmasked_anchors": True}
    collator, table = tiny_collator(DeclutrConfig(**settings_)), documents(LENGTHS, 12)
    epochs = np.zeros(5, np.int64)
    got = rows(collator.batch(table, epochs))
    masked, original = (
        rows(tiny_collator(HALF_MASKED).batch(table, epochs)),
        rows(tiny_collator(NO_MASKS).batch(table, epochs)),
    )
    assert got == masked[:10] + original[:10] + original[10:]


def test_mlm_alone_packs_no_positives():
    table, epochs = documents(LENGTHS, 12), np.zeros(5, np.int64)
    only = tiny_collator(DeclutrConfig(terms="mlm", masking={"mlm_probability": 0.5})).batch(table, epochs)
    both = tiny_collator(HALF_MASKED).batch(table, epochs)
    assert rows(only) == rows(both)[:10]
    assert torch.equal(only.labels, both.labels)


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 5))
def test_ranks_batches_hold_the_global_batchs_spans(cuts, epoch):
    """However the documents are shared out (also none to some), each brings the same spans and masks."""
    collator, table = tiny_collator(HALF_MASKED), documents(LENGTHS, 12)
    bounds = [0, *sorted(cuts), len(LENGTHS)]
    whole = rank_batch(collator, table, epoch=epoch).spans
    parts = [rank_batch(collator, table, a, b, epoch).spans for a, b in pairwise(bounds)]
    counts = [(b - a) * 2 for a, b in pairwise(bounds)]
    anchors = [row for part, count in zip(parts, counts, strict=True) for row in rows(part)[:count]]
    positives = [row for part, count in zip(parts, counts, strict=True) for row in rows(part)[count:]]
    assert anchors + positives == rows(whole)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)


def test_collator_of_no_documents_gives_an_empty_batch():
    batch = rank_batch(tiny_collator(), documents(LENGTHS, 12), 2, 2).spans
    assert (batch.num_spans, batch.num_tokens, len(batch.selected)) == (0, 0, 0)
    assert batch.microbatches(10)[0].num_tokens == 0


def test_chunked_tables_read_like_whole_ones():
    collator, table = tiny_collator(), documents(LENGTHS, 12)
    chunked = pa.concat_tables([table.slice(0, 2), table.slice(2, 1), table.slice(3)])
    assert chunked.column("id").num_chunks == 3
    epochs = np.zeros(5, np.int64)
    assert rows(collator.batch(chunked, epochs)) == rows(collator.batch(table, epochs))


def test_too_short_document_is_an_error():
    spans = SpanConfig(num_anchors=2, num_positives=1, min_tokens=3, max_tokens=20)
    with pytest.raises(ValueError, match=all_of("48 tokens", "too short")):
        tiny_collator(spans=spans).batch(documents([48, 90], 20), np.zeros(2, np.int64))


def test_microbatches_cut_between_spans():
    batch = rank_batch(tiny_collator(HALF_MASKED), documents(LENGTHS, 12)).spans
    for limit in (1, 12, 30, 10_000):
        pieces = batch.microbatches(limit)
        assert all(piece.num_tokens <= limit or piece.num_spans == 1 for piece in pieces)
        assert torch.equal(torch.cat([piece.input_ids for piece in pieces]), batch.input_ids)
        assert torch.equal(torch.cat([piece.lengths for piece in pieces]), batch.lengths)
        assert torch.equal(torch.cat([piece.keys for piece in pieces]), batch.keys)
        shifts = np.cumsum([0] + [piece.num_tokens for piece in pieces])
        selected = torch.cat([piece.selected + int(s) for piece, s in zip(pieces, shifts, strict=False)])
        assert torch.equal(selected, batch.selected)
        assert torch.equal(torch.cat([piece.labels for piece in pieces]), batch.labels)


def test_the_digest_adds_up_over_ranks_and_knows_documents_tokens_masks_and_epochs():
    collator, table, epochs = tiny_collator(HALF_MASKED), documents(LENGTHS, 12), np.array([0, 1, 0, 7, 3])
    whole = collator.batch(table, epochs)
    parts = [collator.batch(table.slice(a, b - a), epochs[a:b]) for a, b in ((0, 2), (2, 2), (2, 5))]
    assert sum(part.digest() for part in parts) % DIGEST == whole.digest()
    assert collator.batch(table, epochs + 1).digest() != whole.digest()
    assert collator.batch(table.take([1, 0, 2, 3, 4]), epochs).digest() != whole.digest()
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
