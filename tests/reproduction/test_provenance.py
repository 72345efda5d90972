"""Commit and machine of a number: those that trained and those that scored, and of no other repository."""

import json
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from papers import arguments, write_item

from declutr.cli.reproduce import run
from declutr.reproduction import provenance


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


def test_commit_is_that_of_a_checkout_and_never_that_of_a_repository_around_the_package(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "theirs")

    def commit(package):
        package.mkdir(parents=True)
        copied = shutil.copy(Path(provenance.__file__).resolve(), package)
        spec = spec_from_file_location("copied", copied)
        made = module_from_spec(spec)
        spec.loader.exec_module(made)
        return made.facts([])["commit"]

    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert commit(tmp_path / ".venv/lib/site-packages/declutr/reproduction") is None
    assert commit(tmp_path / "reproduction") == head.stdout.strip()
