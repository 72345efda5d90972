"""Where files belong is documented, and files that are elsewhere are found."""

from pathlib import Path

import pytest
from sentevaldata import write_binary

from declutr.evaluation.senteval.data.loading import load, task_files
from declutr.evaluation.senteval.data.taskdata import MissingDataError
from declutr.evaluation.senteval.data.tasks import TASKS, find


@pytest.mark.parametrize(
    ("given", "moved", "said"),
    [
        (".", {"downstream": "data/downstream"}, r"2 of 2 files are in .*data/downstream/MR: use --data .*data"),
        (".", {"downstream": "SentEval/data/downstream"}, r"use --data .*SentEval/data"),
        ("downstream", {}, r"use --data .*/data"),
        ("downstream/MR", {}, r"use --data .*/data"),
        (
            ".",
            {"downstream": "Downstream"},
            r"Downstream/MR/rt-polarity.pos was found: rename it to downstream/MR",
        ),
        (
            ".",
            {"downstream/MR": "downstream/mr"},
            r"mr/rt-polarity.pos was found: rename it to downstream/MR/rt-pol",
        ),
        (".", {"downstream/MR": "MR"}, r"MR/rt-polarity.pos was found: move it to .*downstream/MR/rt-polarity.pos"),
        ("gone", {}, r"gone is not a folder"),
    ],
)
def test_files_that_are_elsewhere_are_found(tmp_path, given, moved, said):
    folder = tmp_path / "data"
    write_binary(folder)
    for old, new in moved.items():
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        (folder / old).rename(folder / new)
    with pytest.raises(MissingDataError, match=said):
        load(find("MR"), folder / given)


def test_the_documents_name_every_file():
    text = (Path(__file__).resolve().parents[3] / "docs/senteval.md").read_text(encoding="utf-8")
    layout = text.partition("```\nDIR/downstream/CR/")[2].partition("```")[0]
    for task in TASKS:
        assert f"DIR/{task.folder}/" in f"DIR/downstream/CR/{layout}", task.folder
        for name in task.subsets or [name.rpartition("/")[2] for name in task_files(task)]:
            assert name in layout.split(), name
