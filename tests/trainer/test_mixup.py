"""Mixup of sounds against plain writings, drawn by clip and epoch alone; masks that both views share."""

import pickle
import re

import numpy as np
import pyarrow as pa
import pytest
from mediafiles import sound, tone
from mediarows import MELS, Rows, clip_rows, image_rows
from mediashards import prepare_media
from messages import all_of
from scipy.stats import beta, kstest

from declutr.common import seeding
from declutr.pipeline.media.clips import log_mel
from declutr.pipeline.shards.content import AudioContent
from declutr.pipeline.shards.shards import ShardSet, document_keys
from declutr.trainer.data.chunks import fetched, rank_plan, read_chunk
from declutr.trainer.data.plan import Plan
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.objectives.supcon.collator import ClipCollator, Mixup, clips_of, mixture
from declutr.trainer.objectives.supcon.config import SupconConfig

CLIPS = clip_rows([9, 4, 13, 2, 7, 5, 8], labels="wxyz")


def plainly(rows, epochs, shards, rate, seed):
    """One clip after the other, as the docstrings say it."""
    clips, labels = [], []
    for number in range(len(rows)):
        row = rows.slice(number, 1)
        words = seeding.words(seed, "mixup", document_keys(row), epochs[number : number + 1].astype(np.uint64), 21)
        draws = words[0] / 2**32
        clip, label = np.array(row["frames"][0].as_py()).reshape(-1, MELS), row["label"][0].as_py()
        if draws[0] < rate:
            other = shards.slice(int(draws[1] * len(shards)), 1)
            share = sorted(draws[2:])[9]
            powers = share**2 * np.exp(clip)
            for frame, energies in enumerate(np.array(other["frames"][0].as_py()).reshape(-1, MELS)[: len(clip)]):
                powers[frame] += (1 - share) ** 2 * np.exp(energies)
            clip = np.log(powers)
            label = label if share >= 0.5 else other["label"][0].as_py()
        clips.append(clip)
        labels.append(label)
    return clips, labels


@pytest.mark.parametrize("rate", [0.5, 1.0, 0.0])
def test_mixed_clips_and_labels_equal_a_plain_writing(rate):
    epochs = np.array([0, 3, 1, 4, 1, 5, 9])
    rows = Mixup(rate, 7)(CLIPS, epochs, Rows(CLIPS))
    clips, labels = plainly(CLIPS, epochs, CLIPS, rate, 7)
    for found, expected in zip(clips_of(rows), clips, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert rows["label"].to_pylist() == labels
    changed = [not np.array_equal(a, b) for a, b in zip(clips_of(rows), clips_of(CLIPS), strict=True)]
    assert changed == rows["mixed"].to_pylist()
    assert {0.5: 0 < sum(changed) < 7, 1.0: all(changed), 0.0: not any(changed)}[rate]
    assert rate != 1.0 or labels != CLIPS["label"].to_pylist()


def test_a_clip_is_mixed_by_its_epoch_and_not_by_its_batch():
    """Any worker and any slice of the table reads the same mixtures; another epoch and another seed read others."""
    epochs = np.full(7, 2)
    whole = Mixup(0.5, 7)(CLIPS, epochs, Rows(CLIPS))
    for start, end in ((0, 3), (3, 3), (3, 7)):
        part = Mixup(0.5, 7)(CLIPS.slice(start, end - start), epochs[start:end], Rows(CLIPS))
        assert part.equals(whole.slice(start, end - start))
    assert not Mixup(0.5, 7)(CLIPS, epochs + 1, Rows(CLIPS)).equals(whole)
    assert not Mixup(0.5, 8)(CLIPS, epochs, Rows(CLIPS)).equals(whole)


def test_shares_follow_beta_and_half_of_the_clips_are_mixed():
    """Of two clips whose energies are 0, the mixture has log(s^2 + (1 - s)^2), which gives |2 s - 1|."""
    rows = clip_rows([1] * 3000)
    silent = pa.array([[0.0] * MELS] * 3000, pa.list_(pa.float32()))
    rows = rows.set_column(rows.column_names.index("frames"), "frames", silent)
    found = Mixup(0.5, 0)(rows, np.zeros(3000, np.int64), Rows(rows))
    mixed = found["mixed"].to_numpy()
    assert mixed.sum() == pytest.approx(1500, abs=110)
    powers = np.exp([clip[0, 0] for clip in clips_of(found)])[mixed]
    uneven = np.sqrt(np.maximum(2 * powers - 1, 0))
    law = beta(10, 10).cdf
    assert kstest(uneven, lambda x: law((1 + x) / 2) - law((1 - x) / 2)).pvalue > 1e-3


def test_a_mixture_is_near_that_of_the_waveforms():
    """As released, waveforms are mixed; the energies lack only the products of both sounds, whose mean is 0."""
    content, generator = AudioContent(kind="audio", num_mel_bins=32), np.random.default_rng(0)
    first, second = (generator.normal(size=16_000) * scale for scale in (0.3, 0.1))
    for share in (0.5, 0.35, 0.7):
        expected = log_mel(share * first + (1 - share) * second, content)
        found = mixture(log_mel(first, content), log_mel(second, content), share)
        assert abs(np.exp(found).mean() / np.exp(expected).mean() - 1) < 0.02
        assert abs(np.exp(found).mean(axis=0) / np.exp(expected).mean(axis=0) - 1).max() < 0.1  # each band
        for end in (0.0, 1.0):
            assert np.allclose(mixture(found, expected, end), (expected, found)[int(end)], atol=1e-5)


def views_of(rows, epochs, **config):
    collator = ClipCollator(SupconConfig(**config), FrontendConfig(patch_size=(1, MELS)), 3)
    spans = collator.collate(fetched(Rows(rows), np.arange(len(rows)), epochs, collator.fetch), epochs).spans
    clips = spans.values.numpy().reshape(-1, MELS)
    return [clip[1:] for clip in np.split(clips, np.cumsum(spans.lengths.numpy())[:-1])], spans


def test_one_masked_spectrogram_is_fed_twice():
    """Both views have equal input, the masks of the first of two different views, and different dropout keys."""
    masks, epochs = {"freq_mask": 3, "time_mask": 4}, np.arange(7)
    shared, spans = views_of(CLIPS, epochs, masks=masks | {"shared": True})
    apart, _ = views_of(CLIPS, epochs, masks=masks)
    for first, second, own in zip(shared[::2], shared[1::2], apart[::2], strict=True):
        assert np.array_equal(first, second)
        assert np.array_equal(first, own)
    assert not all(np.array_equal(own, other) for own, other in zip(apart[::2], apart[1::2], strict=True))
    assert (spans.keys[::2] != spans.keys[1::2]).all()
    assert any((clip == 0).any() for clip in shared)


def test_mixed_clips_are_masked_afterwards():
    epochs, masks = np.arange(7), {"freq_mask": 3, "time_mask": 4, "shared": True}
    found, _ = views_of(CLIPS, epochs, masks=masks, mixup=1.0)
    mixed = clips_of(Mixup(1.0, 3)(CLIPS, epochs, Rows(CLIPS)))
    for view, clip in zip(found[::2], mixed, strict=True):
        assert np.array_equal(view[view != 0], clip[view != 0])
        assert (view != 0).any()
    assert any((view == 0).any() for view in found)


def test_the_partner_and_share_of_a_mixture_are_told(tmp_path):
    """Those by which the plain writing mixes; a clip that is not mixed has none."""
    content = {"kind": "audio", "label": r"^(\d)_", "num_mel_bins": MELS}
    folder, _ = prepare_media(tmp_path, content, {f"{n % 3}_{n}.wav": sound(tone(0.2, number=n)) for n in range(12)})
    shards, epochs = ShardSet(folder, "train"), np.zeros(6, np.int64)
    collator = ClipCollator(SupconConfig(mixup=0.5), FrontendConfig(patch_size=(1, MELS)), 3)
    rows = shards.take(np.arange(6))
    every = {f"{one['id'].hex()}, {one['source']} at {one['offset']}": n for n, one in enumerate(rows_of(shards))}
    mixed = collator.fetch(rows, epochs, shards)
    told = collator.told(mixed, epochs, shards)[::2]  # of the first view
    assert 0 < sum("mixed" in one for one in told) < 6
    before, after = clips_of(rows), clips_of(mixed)
    for number, one in enumerate(told):
        found = re.search(r"^([\d.]+) of it mixed with ([\d.]+) of (.*? at \d+)", one)
        assert (found is not None) == mixed["mixed"][number].as_py()
        if found:
            other = clips_of(shards.take(np.array([every[found[3]]])))[0]
            expected = mixture(before[number], other, float(found[1]))
            np.testing.assert_allclose(after[number], expected, atol=0.01)


def rows_of(shards):
    return shards.take(np.arange(shards.num_documents)).select(["id", "source", "offset"]).to_pylist()


def test_clips_that_were_not_mixed_are_refused():
    collator = ClipCollator(SupconConfig(mixup=0.5), FrontendConfig(patch_size=(1, MELS)), 3)
    with pytest.raises(ValueError, match=all_of("objective.mixup = 0.5", "`fetch`")):
        collator.collate(CLIPS, np.zeros(7, np.int64))


def test_images_are_neither_mixed_nor_masked():
    rows = image_rows([(9, 9)] * 3)
    collator = ClipCollator(SupconConfig(mixup=1.0), FrontendConfig(patch_size=(4, 4), image_size=8), 3)
    assert "mixed" not in collator.fetch(rows, np.zeros(3, np.int64), Rows(rows)).column_names


def test_mixup_of_a_worker_without_rows_is_empty():
    rows = Mixup(1.0, 0)(CLIPS.slice(0, 0), np.empty(0, np.int64), Rows(CLIPS))
    assert len(rows) == 0
    assert rows.schema.equals(CLIPS.schema.append(pa.field("mixed", pa.bool_())))


def test_tasks_that_read_shards_mix_as_the_worker_does(tmp_path):
    """A chunk of real shards, read by another process's copy of the fetch, for one worker and for two."""
    content = {"kind": "audio", "label": r"^(\d)_", "num_mel_bins": MELS}
    folder, _ = prepare_media(tmp_path, content, {f"{n % 3}_{n}.wav": sound(tone(0.2, number=n)) for n in range(12)})
    shards = ShardSet(folder, "train")
    collator = ClipCollator(
        SupconConfig(mixup=0.7, masks={"freq_mask": 2, "shared": True}), FrontendConfig(patch_size=(2, MELS)), 3
    )
    plan = Plan(0, shards.num_documents, 6)

    def chunk(rank, workers):
        part = rank_plan(plan, shards, rank, workers, 0, 2, fetch=pickle.loads(pickle.dumps(collator.fetch)))
        return read_chunk({"id": np.zeros(1, np.int64)}, part, 0)

    alone = chunk(0, 1)
    assert 0 < sum(alone["mixed"].to_pylist()) < len(alone)
    epochs, documents = plan.documents(0, 2, 0, 6)
    assert alone.equals(fetched(shards, documents, epochs, collator.fetch))
    for step in (0, 1):
        halves = pa.concat_tables([chunk(rank, 2).slice(3 * step, 3) for rank in (0, 1)])
        assert halves.equals(alone.slice(6 * step, 6))
    assert collator.collate(alone, alone["epoch"].to_numpy()).num_rows == 12
