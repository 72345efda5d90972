"""Views of images: their shapes follow the law of RandomResizedCrop, and each draw has its own key."""

import io

import numpy as np
import pyarrow as pa
import pytest
from messages import all_of
from PIL import Image

from declutr.common.errors import ShardError
from declutr.trainer.objectives.supcon.config import CropConfig
from declutr.trainer.objectives.supcon.crops import VIEWS, Crops

PLAIN = {"hflip": 0.0, "color_jitter_prob": 0.0, "grayscale_prob": 0.0}
SIZE = (200, 200)


def boxes(count=2000, size=SIZE, **config):
    crops = Crops(CropConfig(**config), 32, 0)
    rng = np.random.default_rng(0)
    return np.array([crops._box(size, rng.random(30)) for _ in range(count)])


def picture(seed=0, size=(40, 30)):
    """Rows and columns all differ, so that a mirror image is another."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels, "RGB")


def rows(pictures, said=None):
    raw = []
    for each in pictures:
        each.save(target := io.BytesIO(), "PNG")
        raw.append(target.getvalue())
    return pa.table(
        {
            "id": pa.array([bytes([number]) * 16 for number in range(len(raw))], pa.binary(16)),
            "image": pa.array(raw, pa.binary()),
            "width": [(said or each.size)[0] for each in pictures],
            "height": [(said or each.size)[1] for each in pictures],
        }
    )


def views(table, epochs, seed=0, **config):
    found = Crops(CropConfig(**(PLAIN | config)), 16, seed)(table, np.array(epochs))
    assert "image" not in found.column_names
    return [np.frombuffer(raw.as_py(), np.uint8).reshape(2, 16, 16, 3) for raw in found.column(VIEWS)]


def test_crops_are_as_often_portrait_as_landscape_and_inside_the_image():
    found = boxes()
    wide, high = (found[:, 2:] - found[:, :2]).T
    assert 0.45 < (wide > high).mean() < 0.55
    assert (wide / high).max() < 4 / 3 * 1.02
    assert (high / wide).max() < 4 / 3 * 1.02
    assert (found >= 0).all()
    assert (found <= 200).all()
    assert (found[:, 0] > found[:, 1]).mean() == pytest.approx(0.5, abs=0.06)


def test_areas_and_sides_of_crops_follow_the_plain_law():
    """An area is uniform, the ratio of the sides uniform in its logarithm; what does not fit is drawn again."""
    found = boxes(min_scale=0.36)
    area = (found[:, 2:] - found[:, :2]).prod(axis=1) / 200**2
    assert 0.355 < area.min() < 0.37
    rng = np.random.default_rng(1)
    drawn, ratio = rng.uniform(0.36, 1, 20_000), (4 / 3) ** rng.uniform(-1, 1, 20_000)
    fits = np.maximum(drawn * ratio, drawn / ratio) <= 1
    assert area.mean() == pytest.approx(drawn[fits].mean(), abs=0.015)
    assert area.std() == pytest.approx(drawn[fits].std(), abs=0.015)


def test_large_crops_fit_as_often_as_in_the_plain_law():
    found = boxes(min_scale=0.9)
    whole = (found == [0, 0, 200, 200]).all(axis=1).mean()
    rng = np.random.default_rng(1)
    drawn, ratio = rng.uniform(0.9, 1, 20_000), (4 / 3) ** rng.uniform(-1, 1, 20_000)
    fits = (np.round(200 * (drawn * ratio) ** 0.5) <= 200) & (np.round(200 * (drawn / ratio) ** 0.5) <= 200)
    assert whole == pytest.approx((1 - fits.mean()) ** 10, abs=0.05)


def test_colours_change_by_their_own_draws():
    crops, image = Crops(CropConfig(**(PLAIN | {"color_jitter_prob": 1.0})), 16, 0), picture()
    draws = np.random.default_rng(0).random(40)
    found = [np.asarray(crops.view(image, draws))]
    for place in range(33, 37):  # brightness, contrast, saturation, hue
        changed = draws.copy()
        changed[place] = (changed[place] + 0.5) % 1
        found.append(np.asarray(crops.view(image, changed)))
    assert len({one.tobytes() for one in found}) == 5


def test_crop_that_fits_nowhere_is_the_whole_image():
    assert (boxes(20, (400, 4), min_scale=1.0) == [0, 0, 400, 4]).all()


def test_views_are_keyed_by_image_epoch_view_and_seed_and_by_nothing_else():
    table = rows([picture(), picture(), picture(1)])
    first, second, third = views(table, [0, 0, 3])
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, second)  # another id, the same picture
    assert not np.array_equal(first, views(table, [1, 0, 3])[0])
    assert not np.array_equal(first, views(table, [0, 0, 3], seed=1)[0])
    assert np.array_equal(third, views(table.slice(2), [3])[0])


def test_flips_colours_and_grays_are_as_often_as_asked():
    table, plain = rows([picture()] * 60), views(rows([picture()] * 60), [0] * 60)
    flipped, gray, colored = (
        views(table, [0] * 60, **{name: 1.0}) for name in ("hflip", "grayscale_prob", "color_jitter_prob")
    )
    assert all(np.array_equal(one[:, :, ::-1], other) for one, other in zip(plain, flipped, strict=True))
    assert all((one[..., :1] == one).all() for one in gray)
    assert all(not np.array_equal(one, other) for one, other in zip(plain, colored, strict=True))
    often = views(table, [0] * 60, hflip=0.25)
    same = sum(np.array_equal(a[view], b[view]) for a, b in zip(plain, often, strict=True) for view in (0, 1))
    assert 75 < same < 105


def test_an_image_that_is_not_as_its_row_says_is_refused():
    with pytest.raises(ShardError, match=all_of("(40, 30) pixels", "RGB", "(41, 30)")):
        views(rows([picture()], said=(41, 30)), [0])
