"""The list of planted bugs fits the code."""

from pathlib import Path

from benchmarks.mutants.__main__ import COPIED, read_mutants

ROOT = Path(__file__).resolve().parents[2]


def test_every_planted_bug_can_be_planted_and_tested_in_a_copy():
    mutants = read_mutants(ROOT / "benchmarks" / "mutants" / "mutants.yaml")
    assert len(mutants) > 400
    for one in mutants:
        assert one.planted(ROOT) != (ROOT / one.file).read_text()
        for name in (one.file, *(test.split("::")[0] for test in one.tests)):
            assert name.split("/")[0] in COPIED
            assert (ROOT / name).exists(), name
