"""Thousands of files as the folders they lie in."""

import pytest
from prepared import Row, write_prepared

from declutr.evaluation.report.content import gather
from declutr.evaluation.report.tally import Tally, group_sources


def tallies(names):
    return {name: Tally(1, 10, 1, 5) for name in names}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.jsonl", "b/c.txt"], {"a.jsonl": 1, "b/c.txt": 1}),
        ([f"logs/{n}.txt" for n in range(900)] + ["a.jsonl"], {"logs/ (900 files)": 900, "a.jsonl": 1}),
        (
            [f"x/{year}/{n}.txt" for year in (2019, 2020) for n in range(30)],
            {"x/2019/ (30 files)": 30, "x/2020/ (30 files)": 30},
        ),
        (
            [f"{n}.txt.gz" for n in range(1500)] + [f"{n}.html" for n in range(7)] + [f"d/{n}.txt" for n in range(40)],
            {"*.txt (1,500 files)": 1500, "*.html (7 files)": 7, "d/ (40 files)": 40},
        ),
        ([f"{n}" for n in range(30)], {"* (30 files)": 30}),
        ([f"only/{n}/a.txt" for n in range(30)], {"only/ (30 files)": 30}),
    ],
)
def test_sources_are_grouped_as_deep_as_there_are_few_enough(names, expected):
    found = group_sources(tallies(names), 20)
    assert {name: tally.read for name, tally in found.items()} == expected


def test_the_report_names_folders_and_its_totals_close(tmp_path):
    rows = [Row(f"word{n} " * 40, source=f"logs/{n}.txt") for n in range(60)] + [Row("a b " * 40, source="all.jsonl")]
    rows += [Row(f"x{n} " * 40, source=f"top{n}/a.txt") for n in range(30)]
    manifest = write_prepared(tmp_path / "shards", [rows])
    found = gather(tmp_path / "shards").sources()
    assert found[0][0] == "logs/ (60 files)"
    assert found[-1][0] == "(12 others)"
    assert len(found) == 21
    assert sum(tally.read for _, tally in found) == manifest.totals["read"]
