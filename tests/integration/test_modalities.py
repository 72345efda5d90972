"""The commands of docs/guides/modalities.md and texts.md as written there."""

import re

import pytest
import tinyruns as runs
import yaml
from mediafiles import png, sound, spread, tone

from declutr.cli.main import main
from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer.config import TrainConfig

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.usefixtures("session")]
PAGE = (runs.ROOT / "docs/guides/modalities.md").read_text()
COMMANDS = runs.commands_of(PAGE)
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
# What differs: fewer rows are compared, and the training starts no group (other tests do).
SIZES = {"verify-gradients": ["--documents", "2", "--processes", "2"], "train": ["scaling.num_workers=0"]}


def write_files(folder):
    """A newcomer's folder: pictures and sounds with labels, sentences, and our configs."""
    (folder / "configs").symlink_to(runs.ROOT / "configs")
    spread(folder / "pictures", {f"{('cat', 'dog')[n % 2]}/{n:04}.png": png(n, (40, 36)) for n in range(50)})
    spread(folder / "sounds", {f"{n % 5}_jackson_{n}.wav": sound(tone(0.3, 8000, n), 8000) for n in range(20)})
    lines = [f"Sentence {n} says that {n * 7919 % 101} birds saw {n * 31 % 17} cats." for n in range(400)]
    (folder / "sentences.txt").write_text("\n".join(lines) + "\n")
    for name, block in zip(("pictures", "sounds"), BLOCKS, strict=False):
        (folder / f"{name}.yaml").write_text(block)


def test_the_commands_do_what_they_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    assert [command[0] for command in COMMANDS] == [
        *("prepare", "prepare", "inspect", "report"),
        *("prepare", "report"),
        *("prepare", "verify-gradients", "train", "why"),
    ]
    for command in COMMANDS:
        assert main([*command, *SIZES.get(command[0], [])]) == 0, f"{command}: {capsys.readouterr()}"
    assert load_manifest(tmp_path / "data" / "pictures").totals["kept"] == 50
    assert load_manifest(tmp_path / "data" / "sounds").labels == {str(label): 4 for label in range(5)}
    assert (tmp_path / "data" / "pictures" / "report" / "report.html").is_file()
    steps = runs.steps_of(tmp_path / "runs" / "visualcse-small")
    assert all("image_supcon" in line for line in steps.values())
    assert (tmp_path / "runs" / "visualcse-small" / "export" / "model.safetensors").is_file()


def test_the_task_of_the_page_is_valid():
    sections = yaml.safe_load(BLOCKS[2])["train"]
    config = TrainConfig.model_validate(
        {"data": "data/texts", "run": "runs/any", **sections, "encoder": {"pretrained": "x"}}
    )
    assert config.auxiliary_tasks["image"].batch_documents == 48


SECTION = (
    (runs.ROOT / "docs/guides/texts.md").read_text().split("\n## Sentences, pairs and triples\n")[1].split("\n## ")[0]
)


def test_the_example_gives_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(runs.ROOT / "configs")
    (block,) = re.findall(r"```json\n(.*?)```", SECTION, re.DOTALL)
    (tmp_path / "pairs.jsonl").write_text(block)
    commands = runs.commands_of(SECTION)
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
