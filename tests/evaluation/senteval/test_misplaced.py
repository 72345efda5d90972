"""Where files belong is documented, and files that are elsewhere are found."""

from pathlib import Path

import pytest
from messages import all_of
from sentevaldata import write_binary

from declutr.common.errors import MissingDataError
from declutr.evaluation.senteval.data.loading import load, task_files
from declutr.evaluation.senteval.data.tasks import TASKS, find


@pytest.mark.parametrize(
    ("given", "moved", "said"),
    [
        (".", {"downstream": "data/downstream"}, ("2 of 2 files", "data/downstream/MR", "--data")),
        (".", {"downstream": "SentEval/data/downstream"}, ("--data", "SentEval/data")),
        ("downstream", {}, ("--data", "/data")),
        ("downstream/MR", {}, ("--data", "/data")),
        (
            ".",
            {"downstream": "Downstream"},
            ("Downstream/MR/rt-polarity.pos", "rename", "downstream/MR"),
        ),
        (
            ".",
            {"downstream/MR": "downstream/mr"},
            ("mr/rt-polarity.pos", "rename", "downstream/MR/rt-polarity.pos"),
        ),
        (".", {"downstream/MR": "MR"}, ("MR/rt-polarity.pos", "move", "downstream/MR/rt-polarity.pos")),
        ("gone", {}, ("gone", "not a folder")),
    ],
)
def test_files_that_are_elsewhere_are_found(tmp_path, given, moved, said):
    folder = tmp_path / "data"
    write_binary(folder)
    for old, new in moved.items():
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        (folder / old).rename(folder / new)
    with pytest.raises(MissingDataError, match=all_of(said)):
        load(find("MR"), folder / given)


def test_the_documents_name_every_file():
    text = (Path(__file__).resolve().parents[3] / "docs/guides/evaluate.md").read_text(encoding="utf-8")
    layout = text.partition("```\nDIR/downstream/CR/")[2].partition("```")[0]
    for task in TASKS:
        assert f"DIR/{task.folder}/" in f"DIR/downstream/CR/{layout}", task.folder
        for name in task.subsets or [name.rpartition("/")[2] for name in task_files(task)]:
            assert name in layout.split(), name
