"""The search on a real Ray session: the same bytes whatever the order of units and of buckets."""

from collections import Counter
from itertools import permutations
from unittest.mock import patch

import numpy as np
import planted
import pytest
import ray
from planted import write
from preparing import checksums

from declutr.pipeline.duplicates import search as search_module
from declutr.pipeline.duplicates.config import DuplicatesConfig, NearConfig
from declutr.pipeline.duplicates.keys import number
from declutr.pipeline.duplicates.pairs import COLUMNS, removed
from declutr.pipeline.duplicates.search import _join_all, find_duplicates, search_bucket

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]
CONFIG = DuplicatesConfig(near=NearConfig())
KEYS_PER_BUCKET = 800


@pytest.fixture(autouse=True, scope="module")
def _many_buckets():
    with patch.object(search_module, "KEYS_PER_BUCKET", KEYS_PER_BUCKET):
        yield


@pytest.fixture(scope="module")
def units():
    """Four units; unit 2 holds copies of documents 0 to 9 of unit 0, unit 3 equal texts and a near copy of its own."""
    rng = np.random.default_rng(0)
    texts = [planted.zipf_text(rng, 150) for _ in range(60)]
    near = [planted.change(rng, text, 0.02) for text in (*texts[:10], texts[50])]
    return [texts[:30], [], near[:10] + texts[30:45], [texts[0], texts[0], *texts[45:], near[10]]]


@pytest.fixture(scope="module")
def searched(units, tmp_path_factory):
    folder = tmp_path_factory.mktemp("searched")
    names = write(folder, units, CONFIG)
    find_duplicates(folder, names, CONFIG)
    return folder, names


def kinds(folder, names):
    return Counter(duplicate.kind for name in names for duplicate in removed(folder, name)[0].values())


def test_search_drops_copies_for_the_first_document(searched):
    folder, names = searched
    assert number(folder, names)[2] > 2 * KEYS_PER_BUCKET, "three buckets, each a task"
    assert ray.cluster_resources()["CPU"] == 6, "as the fixture of the session has asked for"
    assert [removed(folder, name) for name in (*names[:2], "99999")] == [({}, None)] * 3
    copies, _ = removed(folder, names[2])
    for ordinal, duplicate in copies.items():
        copy = duplicate.unit, duplicate.ordinal, duplicate.kind, duplicate.kept_unit, duplicate.kept_ordinal
        assert copy == (names[2], ordinal, "near", names[0], ordinal)
        assert 0.7 < duplicate.similarity < 1
        assert duplicate.cluster_size == (4 if ordinal == 1 else 2)
    last = [(copy.kind, copy.kept_unit, copy.kept_ordinal) for copy in removed(folder, names[3])[0].values()]
    assert last == [("exact", names[0], 1), ("exact", names[0], 1), ("near", names[3], 3 * 7 + 1)]
    assert (list(copies), kinds(folder, names)) == ([3 * row + 1 for row in range(10)], {"near": 11, "exact": 2})


def test_results_of_other_settings_or_keys_are_not_taken_and_without_duplicates_nothing_is_dropped(units, tmp_path):
    names = write(tmp_path, units, CONFIG)
    find_duplicates(tmp_path, names, CONFIG)
    find_duplicates(tmp_path, names, DuplicatesConfig(near=NearConfig(similarity=0.99)))
    assert kinds(tmp_path, names) == {"exact": 2}
    cases = (CONFIG, [units[0], [], [], units[3][2:]], {"near": 1}), (CONFIG, [[], []], {})
    for config, texts, dropped in (*cases, (DuplicatesConfig(), [["one text"], ["another"]], {})):
        names = write(tmp_path, texts, config)
        find_duplicates(tmp_path, names, config)
        assert kinds(tmp_path, names) == dropped


def test_the_order_of_units_and_of_buckets_does_not_show(units, searched, tmp_path):
    """More or fewer workers finish buckets in another order."""
    names = write(tmp_path, units, CONFIG, order=[3, 1, 0, 2])
    find_duplicates(tmp_path, names, CONFIG)
    assert checksums(tmp_path) == checksums(searched[0])
    documents = number(tmp_path, names)[0]
    rows = [search_bucket({"bucket": bucket}, documents, CONFIG, 3) for bucket in range(3)]
    orders = [_join_all(order) for order in permutations(rows)]
    assert [len({getattr(pairs, name).tobytes() for pairs in orders}) for name in COLUMNS] == [1] * len(COLUMNS)
