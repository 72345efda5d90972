"""Philox's published answers, and draws that depend on their position alone."""

import ast
import hashlib
from pathlib import Path

import numpy as np
import pytest

from declutr.common import seeding
from declutr.trainer.objectives.declutr.objective import DISTANT


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, answer):
    """The three vectors of Random123's kat_vectors for philox4x32-10."""
    words = seeding.philox(key, tuple(np.array([c], np.uint64) for c in counter))
    assert " ".join(f"{word:08x}" for word in words[0]) == answer


def positions(count):
    rng = np.random.default_rng(0)
    return rng.integers(0, 2**64, count, dtype=np.uint64), rng.integers(0, 2**32, count, dtype=np.uint64)


def test_a_row_depends_on_its_position_alone():
    major, minor = positions(20)
    together = seeding.words(7, "spans", major, minor, 13)
    order = np.random.default_rng(1).permutation(20)
    assert (seeding.words(7, "spans", major[order], minor[order], 13) == together[order]).all()
    assert (seeding.words(7, "spans", major[3:4], minor[3:4], 5)[0] == together[3, :5]).all()


def test_streams_of_purposes_and_seeds_differ():
    major, minor = positions(50)
    streams = [seeding.words(seed, purpose, major, minor, 4) for seed in (0, 1) for purpose in ("spans", "mlm")]
    assert len({stream.tobytes() for stream in streams}) == 4
    assert seeding.key_for(1, "2x") != seeding.key_for(12, "x")


def test_draws_depend_on_every_coordinate():
    zero = np.zeros(1, np.uint64)
    rows = [
        seeding.blocks(0, "x", major, minor, index).tobytes()
        for major, minor, index in [
            (zero, zero, zero),
            (zero + np.uint64(1), zero, zero),
            (zero + np.uint64(2**32), zero, zero),
            (zero, zero + np.uint64(1), zero),
            (zero, zero, zero + np.uint64(1)),
        ]
    ]
    assert len(set(rows)) == len(rows)


def test_unit_stays_below_one():
    edges = seeding.unit(np.array([0, 2**32 - 1], np.uint32))
    assert edges[0] == 0.0
    assert edges[1] < 1.0
    assert int(edges[1] * (2**20 + 1)) == 2**20


def test_draws_of_words_are_uniform():
    """Mean and variance of a million draws within 5 standard errors."""
    uniform = seeding.unit(seeding.words(0, "x", np.arange(1000, dtype=np.uint64), np.zeros(1000, np.uint64), 1000))
    assert abs(uniform.mean() - 0.5) < 5 * np.sqrt(1 / 12 / uniform.size)
    assert abs(uniform.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / uniform.size)


def test_torch_seeds_differ_by_purpose():
    seeds = {seeding.torch_seed(0, "dropout", *position) for position in [(), (1,), (1, 2), (12,), (2, 1)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_positions_and_seeds_have_their_places():
    """Every draw of a run depends on them: in blocks, the counter is (index, minor, low and high half of major)."""
    major, minor, index = (np.array([value], np.uint64) for value in (0x123456789ABCDEF0, 7, 11))
    counters = tuple(np.array([value], np.uint64) for value in (11, 7, 0x9ABCDEF0, 0x12345678))
    expected = seeding.philox(seeding.key_for(3, "spans"), counters)
    assert np.array_equal(seeding.blocks(3, "spans", major, minor, index), expected)
    digest = hashlib.blake2b(b"3\0dropout\0001\0002", digest_size=8).digest()
    assert seeding.torch_seed(3, "dropout", 1, 2) == int.from_bytes(digest, "little") // 2


PURPOSES = {
    "adaptation pairs", "adaptation split", "branch", "choosing half", "collapse", "corpus", "coverage", "crop {view}",
    "difficult texts", "dropout", "frontend", "hashed-words", "held-out", "label {label}", "map", "mask {view}",
    "mixup", "mlm", "objective", "order", "paired bootstrap", "projection", "report", "scl", "share of the corpus",
    "spans", "text", "weights",
}  # fmt: skip


def test_purposes_of_draws_stay_when_code_is_renamed():
    """A changed purpose changes every number drawn for it: splits, spans, masks, weights and dropout."""
    root, found = Path(seeding.__file__).parents[1], set()
    for package in ("adaptation", "common", "embedding", "encoders", "evaluation", "pipeline", "trainer"):
        for path in (root / package).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "seeding." in text else ():
                name = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
                if name in ("blocks", "key_for", "torch_seed", "words") and ast.unparse(node.func) == f"seeding.{name}":
                    found.add(ast.unparse(node.args[1]).lstrip("f").strip("'"))
    assert found - {"purpose"} | {"spans"} == PURPOSES
    assert DISTANT == "distant spans"
