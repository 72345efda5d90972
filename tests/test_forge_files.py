"""Files that a forge, a package index or a reader of the repository uses."""

import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))


def test_citation_version_is_that_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert all(citation[key] for key in ("cff-version", "title", "message", "authors", "references"))


def test_workflow_calls_the_checks_of_every_change():
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["ci"]
    assert job["steps"][-1]["run"].endswith("bash .ci/run")


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_form_asks_with_unique_ids(form):
    fields = yaml.safe_load(form.read_text())["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_licence_is_said_to_be_missing_until_there_is_one():
    given = "license" in PROJECT or (ROOT / "LICENSE").exists()
    for name in ("README.md", "trainer/driver/model_card.py", "pyproject.toml"):
        assert given or "licence" in (ROOT / name).read_text().lower(), name
