"""Where files belong is documented, and said when they are elsewhere."""

from pathlib import Path

import pytest
from messages import all_of
from sentevaldata import write_binary

from declutr.common.errors import MissingDataError
from declutr.evaluation.senteval.data.loading import load, task_files
from declutr.evaluation.senteval.data.tasks import TASKS, find


@pytest.mark.parametrize("folder", ["", "data/downstream", "data/downstream/MR", "gone"])
def test_where_files_belong_is_said_when_they_are_elsewhere(tmp_path, folder):
    write_binary(tmp_path / "data")
    place = str(tmp_path / folder / "downstream/MR")
    with pytest.raises(MissingDataError, match=all_of((place, "rt-polarity.pos", "--data", "downstream/", "case"))):
        load(find("MR"), tmp_path / folder)


def test_the_documents_name_every_file():
    text = (Path(__file__).resolve().parents[3] / "docs/guides/evaluate.md").read_text(encoding="utf-8")
    layout = text.partition("```\nDIR/downstream/CR/")[2].partition("```")[0]
    for task in TASKS:
        assert f"DIR/{task.folder}/" in f"DIR/downstream/CR/{layout}", task.folder
        for name in task.subsets or [name.rpartition("/")[2] for name in task_files(task)]:
            assert name in layout.split(), name
