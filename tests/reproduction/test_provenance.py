"""Commit and machine of a number: those that trained and those that scored."""

import json

import pytest
import yaml
from papers import arguments, write_item

from declutr.cli.reproduce import run


@pytest.mark.slow
def test_commit_and_machine_of_the_training_stay_when_its_run_is_scored_again(tmp_path):
    item, work = write_item(tmp_path), tmp_path / "work"
    values = yaml.safe_load(item.read_text()) | {"axes": {"run": {"one": {}}}, "printed": {}}
    item.write_text(yaml.safe_dump(values))
    folder = work / "terms-tiny"

    def results():
        assert run(arguments(item, work, "--seeds", "0")) == 0
        return json.loads((folder / "results-part.json").read_text()), (folder / "results-part.md").read_text()

    found, text = results()
    assert found["trained_by"] == found["scored_by"]
    assert "Trained by" not in text
    (folder / "one-0/trained_by.json").write_text(json.dumps([found["scored_by"][0] | {"commit": "0123abc"}]))
    (folder / "one-0/scores.json").unlink()
    again, text = results()
    assert [one["commit"] for one in again["trained_by"]] == ["0123abc"]
    assert again["scored_by"] == found["scored_by"]
    assert text.index("Trained by: *Hardware:*") < text.index("0123abc") < text.index("Scored by: *Hardware:*")
