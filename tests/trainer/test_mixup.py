"""Views of clips: mixup of sounds against plain writings, and crops of images that follow the plain law."""

import pickle
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from mediafiles import picture, sound, stored, tone
from messages import all_of
from preparing import prepare_media
from rows import MELS, Rows, clip_rows, image_rows
from scipy.stats import beta, kstest

from declutr.common import seeding
from declutr.common.errors import ShardError
from declutr.pipeline.media.clips import log_mel
from declutr.pipeline.shards.content import AudioContent
from declutr.pipeline.shards.shards import ShardSet, document_keys
from declutr.trainer.data import chunks
from declutr.trainer.data.chunks import fetched, rank_plan, read_chunk
from declutr.trainer.data.plan import Plan
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.objectives.supcon.clips import VIEWS, ClipFetch, clips_of, mixture
from declutr.trainer.objectives.supcon.collator import ClipCollator
from declutr.trainer.objectives.supcon.config import CropConfig, SupconConfig

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
            other, share = shards.slice(int(draws[1] * len(shards)), 1), sorted(draws[2:])[9]
            powers = share**2 * np.exp(clip)
            for frame, energies in enumerate(np.array(other["frames"][0].as_py()).reshape(-1, MELS)[: len(clip)]):
                powers[frame] += (1 - share) ** 2 * np.exp(energies)
            clip = np.log(powers)
            label = label if share >= 0.5 else other["label"][0].as_py()
        clips.append(clip)
        labels.append(label)
    return clips, labels


def mixed(rate, seed, epochs, rows=CLIPS):
    return ClipFetch(CropConfig(), 16, seed, rate).mixed(rows, np.asarray(epochs), Rows(CLIPS))


@pytest.mark.parametrize("rate", [0.5, 1.0, 0.0])
def test_mixed_clips_and_labels_equal_a_plain_writing(rate):
    epochs = np.array([0, 3, 1, 4, 1, 5, 9])
    rows = mixed(rate, 7, epochs)
    clips, labels = plainly(CLIPS, epochs, CLIPS, rate, 7)
    np.testing.assert_allclose(np.concatenate(clips_of(rows)), np.concatenate(clips), rtol=1e-5, atol=1e-6)
    assert rows["label"].to_pylist() == labels
    changed = [not np.array_equal(a, b) for a, b in zip(clips_of(rows), clips_of(CLIPS), strict=True)]
    assert {0.5: 0 < sum(changed) < 7, 1.0: all(changed), 0.0: not any(changed)}[rate]
    assert rate != 1.0 or labels != CLIPS["label"].to_pylist()


def test_a_clip_is_mixed_by_its_epoch_and_not_by_its_batch():
    whole = mixed(0.5, 7, [2] * 7)
    assert whole.schema.equals(CLIPS.schema)
    for start, number in ((0, 3), (3, 0), (3, 4)):
        assert mixed(0.5, 7, [2] * number, CLIPS.slice(start, number)).equals(whole.slice(start, number))
    assert not mixed(0.5, 7, [3] * 7).equals(whole)
    assert not mixed(0.5, 8, [2] * 7).equals(whole)


def test_shares_follow_beta_and_half_of_the_clips_are_mixed():
    """Of two clips whose energies are 0, the mixture has log(s^2 + (1 - s)^2), which gives |2 s - 1|."""
    rows = clip_rows([1] * 3000)
    silent = pa.array([[0.0] * MELS] * 3000, pa.list_(pa.float32()))
    rows = rows.set_column(rows.column_names.index("frames"), "frames", silent)
    table = ClipFetch(CropConfig(), 16, 0, 0.5).mixed(rows, np.zeros(3000, np.int64), Rows(rows))
    powers = np.exp([clip[0, 0] for clip in clips_of(table)])
    powers = powers[powers < 1]
    assert len(powers) == pytest.approx(1500, abs=110)
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
        assert first.tolist() == second.tolist() == own.tolist()
    assert not all(np.array_equal(own, other) for own, other in zip(apart[::2], apart[1::2], strict=True))
    assert (spans.keys[::2] != spans.keys[1::2]).all()
    assert any((clip == 0).any() for clip in shared)


def test_mixed_clips_are_masked_afterwards_and_images_are_neither_mixed_nor_masked():
    images, epochs = image_rows([(9, 9)] * 3), np.zeros(3, np.int64)
    collator = ClipCollator(SupconConfig(mixup=1.0), FrontendConfig(patch_size=(4, 4), image_size=8), 3)
    assert collator.fetch(images, epochs, Rows(images)).equals(collator.fetch.views(images, epochs))
    clips, _ = views_of(CLIPS, np.arange(7), masks={"freq_mask": 3, "time_mask": 4, "shared": True}, mixup=1.0)
    for view, clip in zip(clips[::2], clips_of(mixed(1.0, 3, np.arange(7))), strict=True):
        assert np.array_equal(view[view != 0], clip[view != 0])
        assert (view != 0).any()
    assert any((view == 0).any() for view in clips)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    content = {"kind": "audio", "label": r"^(\d)_", "num_mel_bins": MELS}
    files = {f"{n % 3}_{n}.wav": sound(tone(0.2, number=n)) for n in range(12)}
    return ShardSet(prepare_media(tmp_path_factory.mktemp("sounds"), content, files)[0], "train")


def test_the_partner_and_share_of_a_mixture_are_told(sounds):
    epochs, rows = np.zeros(6, np.int64), sounds.take(np.arange(6))
    collator = ClipCollator(SupconConfig(mixup=0.5), FrontendConfig(patch_size=(1, MELS)), 3)
    every = sounds.take(np.arange(sounds.num_documents))
    origins = every.select(["id", "source", "offset"]).to_pylist()
    places = {f"{row['id'].hex()}, {row['source']} at {row['offset']}": n for n, row in enumerate(origins)}
    mixtures = collator.fetch(rows, epochs, sounds)
    texts = collator.describe(mixtures, epochs, sounds)[::2]  # of the first view
    assert 0 < sum("mixed" in text for text in texts) < 6
    for before, after, text in zip(clips_of(rows), clips_of(mixtures), texts, strict=True):
        match = re.search(r"^([\d.]+) of it mixed with ([\d.]+) of (.*? at \d+)", text)
        assert (match is None) == np.array_equal(before, after)
        if match:
            expected = mixture(before, clips_of(every)[places[match[3]]], float(match[1]))
            np.testing.assert_allclose(after, expected, atol=0.01)


def test_tasks_that_read_shards_mix_as_the_worker_does(sounds):
    """A chunk of real shards, read by another process's copy of the fetch, for one worker and for two."""
    config = SupconConfig(mixup=0.7, masks={"freq_mask": 2, "shared": True})
    collator, plan = ClipCollator(config, FrontendConfig(patch_size=(2, MELS)), 3), Plan(0, sounds.num_documents, 6)

    def chunk(rank, workers):
        part = rank_plan(plan, sounds, rank, workers, 0, 2, fetch=pickle.loads(pickle.dumps(collator.fetch)))
        return read_chunk({"id": np.zeros(1, np.int64)}, part, 0)

    alone = chunk(0, 1)
    epochs, documents = plan.documents(0, 2, 0, 6)
    apart = zip(clips_of(alone), clips_of(sounds.take(documents)), strict=True)
    assert 0 < sum(np.array_equal(*clips) for clips in apart) < len(alone)
    assert alone.equals(fetched(sounds, documents, epochs, collator.fetch))
    for step in (0, 1):
        halves = pa.concat_tables([chunk(rank, 2).slice(3 * step, 3) for rank in (0, 1)])
        assert halves.equals(alone.slice(6 * step, 6))
    assert collator.collate(alone, alone["epoch"].to_numpy()).num_rows == 12


def test_chunks_of_sounds_are_bounded_by_their_energies_and_change_no_row(sounds, monkeypatch):
    totals = sounds.manifest.totals
    monkeypatch.setattr(chunks, "_CHUNK_VALUES", 4 * (MELS * totals["num_tokens"] // totals["kept"]))
    part = rank_plan(Plan(0, sounds.num_documents, 2), sounds, 0, 1, 0, 5)
    assert part.chunk_steps == 2
    tables = [read_chunk({"id": np.array([number])}, part, 0) for number in range(part.num_chunks)]
    assert pa.concat_tables(tables).equals(read_chunk({"id": np.array([0])}, replace(part, chunk_steps=5), 0))


PLAIN = {"hflip": 0.0, "color_jitter_prob": 0.0, "grayscale_prob": 0.0}


def boxes(count=2000, size=(200, 200), **config):
    crops, rng = ClipFetch(CropConfig(**config), 32, 0), np.random.default_rng(0)
    return np.array([crops._box(size, rng.random(30)) for _ in range(count)])


def rows(pictures, said=None):
    ids = pa.array([bytes([number]) * 16 for number in range(len(pictures))], pa.binary(16))
    width, height = zip(*(said or image.size for image in pictures), strict=True)
    images = pa.array(map(stored, pictures), pa.binary())
    return pa.table({"id": ids, "image": images, "width": width, "height": height})


def views(table, epochs, seed=0, **config):
    found = ClipFetch(CropConfig(**(PLAIN | config)), 16, seed).views(table, np.array(epochs))
    assert "image" not in found.column_names
    return [np.frombuffer(raw.as_py(), np.uint8).reshape(2, 16, 16, 3) for raw in found.column(VIEWS)]


def test_crops_are_as_often_portrait_as_landscape_and_inside_the_image():
    crops = boxes()
    wide, high = (crops[:, 2:] - crops[:, :2]).T
    assert 0.45 < (wide > high).mean() < 0.55
    assert np.maximum(wide / high, high / wide).max() < 4 / 3 * 1.02
    assert ((crops >= 0) & (crops <= 200)).all()
    assert (crops[:, 0] > crops[:, 1]).mean() == pytest.approx(0.5, abs=0.06)
    assert (boxes(20, (400, 4), min_scale=1.0) == [0, 0, 400, 4]).all(), "a crop that fits nowhere is the whole image"


@pytest.mark.parametrize("min_scale", [0.36, 0.9])
def test_areas_and_sides_of_crops_follow_the_plain_law(min_scale):
    """An area is uniform, the ratio of the sides uniform in its logarithm; after ten that do not fit, the whole."""
    found = boxes(min_scale=min_scale)
    area, whole = (found[:, 2:] - found[:, :2]).prod(axis=1) / 200**2, (found == [0, 0, 200, 200]).all(axis=1)
    rng = np.random.default_rng(1)
    drawn, ratio = rng.uniform(min_scale, 1, 20_000), (4 / 3) ** rng.uniform(-1, 1, 20_000)
    fits = np.round(200 * np.maximum(drawn * ratio, drawn / ratio) ** 0.5) <= 200
    assert whole.mean() == pytest.approx((1 - fits.mean()) ** 10, abs=0.05)
    assert min_scale - 0.005 < area.min() < min_scale + 0.01
    assert area[~whole].mean() == pytest.approx(drawn[fits].mean(), abs=0.015)
    assert area[~whole].std() == pytest.approx(drawn[fits].std(), abs=0.015)


def test_colours_change_by_their_own_draws():
    crops = ClipFetch(CropConfig(**(PLAIN | {"color_jitter_prob": 1.0})), 16, 0)
    draws = np.tile(np.random.default_rng(0).random(40), (5, 1))
    draws[range(1, 5), range(33, 37)] += 0.5  # brightness, contrast, saturation, hue
    assert len({crops.view(picture(), row % 1).tobytes() for row in draws}) == 5


def test_views_are_keyed_by_image_epoch_view_and_seed_and_by_nothing_else():
    table = rows([picture(), picture(), picture(1)])
    first, second, third = views(table, [0, 0, 3])
    others = views(table, [1, 0, 3])[0], views(table, [0, 0, 3], seed=1)[0]
    assert not np.array_equal(first[0], first[1])
    assert not any(np.array_equal(first, other) for other in (second, *others))  # second: another id, the same picture
    assert np.array_equal(third, views(table.slice(2), [3])[0])


def test_flips_colours_and_grays_are_as_often_as_asked():
    table, changes = rows([picture()] * 60), ("hflip", "grayscale_prob", "color_jitter_prob")
    plain, *others = (views(table, [0] * 60, **change) for change in ({}, *({name: 1.0} for name in changes)))
    flipped, gray, colored = others
    assert all(np.array_equal(one[:, :, ::-1], other) for one, other in zip(plain, flipped, strict=True))
    assert all((one[..., :1] == one).all() for one in gray)
    assert all(not np.array_equal(one, other) for one, other in zip(plain, colored, strict=True))
    often = views(table, [0] * 60, hflip=0.25)
    same = sum(np.array_equal(a[view], b[view]) for a, b in zip(plain, often, strict=True) for view in (0, 1))
    assert 75 < same < 105


def test_an_image_that_is_not_as_its_row_says_is_refused():
    with pytest.raises(ShardError, match=all_of("(40, 30) pixels", "RGB", "(41, 30)")):
        views(rows([picture()], said=(41, 30)), [0])
