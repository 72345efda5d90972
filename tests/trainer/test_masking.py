"""Masks belong to the token's place in the corpus, not to the batch."""

import numpy as np
import pytest
from tiny import VOCABULARY

from declutr.trainer.objectives.masking import MaskingConfig, mask_tokens

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
    vocabulary = VOCABULARY
    return mask_tokens(
        config or MaskingConfig(mlm_probability=0.5),
        seed,
        *(given[name] for name in COLUMNS),
        vocabulary.size,
        vocabulary.mask,
        np.array(vocabulary.special),
    )


def test_same_draws_in_any_batch():
    given = tokens()
    masked, selected = mask(given)
    order = np.random.default_rng(1).permutation(400)[:70]
    part_masked, part_selected = mask({name: column[order] for name, column in given.items()})
    assert (part_masked == masked[order]).all()
    assert (part_selected == selected[order]).all()


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


def test_given_tokens_stay_as_they_are():
    given = tokens()
    before = given["ids"].copy()
    mask(given)
    assert (given["ids"] == before).all()


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


def test_selected_tokens_are_masked_replaced_and_kept_as_often_as_asked():
    """Replacements are drawn from the whole vocabulary, whatever was drawn to decide on the replacement."""
    given = tokens(20_000)
    given["ids"] = np.full(20_000, 7)
    masked, selected = mask(given, MaskingConfig(mlm_probability=0.5, mask_replace_prob=0.6, random_replace_prob=0.3))
    assert selected.mean() == pytest.approx(0.5, abs=0.02)
    found = np.bincount(masked[selected], minlength=VOCABULARY.size) / selected.sum()
    expected = np.full(VOCABULARY.size, 0.3 / VOCABULARY.size)
    expected[VOCABULARY.mask] += 0.6
    expected[7] += 0.1
    assert found == pytest.approx(expected, abs=0.02)
    rest = np.delete(found, [7, VOCABULARY.mask])
    assert rest == pytest.approx(np.delete(expected, [7, VOCABULARY.mask]), abs=0.004)
