"""The example of docs/guides/texts.md for sentences, pairs and triples, exactly as it is written there."""

import re
import shlex

import pytest
import tinyruns as runs

from declutr.cli.main import main
from declutr.pipeline.shards.manifest import load_manifest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]
SECTION = (
    (runs.ROOT / "docs/guides/texts.md").read_text().split("\n## Sentences, pairs and triples\n")[1].split("\n## ")[0]
)


def test_the_example_gives_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(runs.ROOT / "configs")
    (block,) = re.findall(r"```json\n(.*?)```", SECTION, re.DOTALL)
    (tmp_path / "pairs.jsonl").write_text(block)
    commands = [
        shlex.split(line, comments=True)[1:] for line in SECTION.splitlines() if line.startswith("    declutr ")
    ]
    assert [command[0] for command in commands] == ["prepare", "inspect", "report"]
    for command in commands:
        assert main(command) == 0
    manifest = load_manifest(tmp_path / "data" / "pairs")
    assert manifest.totals["kept"] == 2
    assert manifest.dropped == {"no_gold_label": 1}
    assert manifest.labels == {"contradiction": 2, "entailment": 2, "neutral": 1}
    told = capsys.readouterr().out
    assert re.search(r"premise +\d+ tokens  A man plays a guitar\.", told)
    assert (tmp_path / "data" / "pairs" / "report" / "report.html").is_file()
