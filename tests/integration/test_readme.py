"""Runs the commands of "Your corpus in 30 minutes" and of the README, exactly as they are written there."""

import shlex

import numpy as np
import pytest
import tinyruns as runs

from declutr.cli.main import main
from declutr.common.config import load_config
from declutr.pipeline.config import PipelineConfig
from declutr.trainer.config import TrainConfig

PAGE = (runs.ROOT / "docs/start/corpus.md").read_text()
README = (runs.ROOT / "README.md").read_text()


def code(text):
    """Lines of the blocks of code that are indented."""
    return [line.removeprefix("    ") for line in text.splitlines() if line.startswith("    ")]


SNIPPET = "\n".join(line for line in code(PAGE) if not line.startswith("declutr "))
COMMANDS = runs.commands_of(PAGE)
COMMANDS += [command for command in runs.commands_of(README) if command not in COMMANDS]
COMMANDS.sort(key=lambda command: command[0] == "adapt")  # last: it starts from the encoder that others train here
# What differs: everything is small.
SHAPE = "{model_type: roberta, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 48}"
SIZES = {
    "prepare": ["validation_fraction=0.1"],
    "train": [f"encoder.from_config={SHAPE}", "scaling.num_workers=0"],  # other tests start a group
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A user's folder: our configs and questions, texts, a page of ours."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("configs", "examples"):
        (folder / name).symlink_to(runs.ROOT / name)
    (folder / "pairs.jsonl").symlink_to(runs.ROOT / "examples" / "questions.jsonl")
    (folder / "my/texts").mkdir(parents=True)
    runs.write_corpus(folder / "my/texts/my.jsonl", documents=40, words=(1200, 1600))
    (folder / "sentences.txt").write_text("A sentence.\nAnd another one.\n")
    (folder / "docs/start").mkdir(parents=True)
    (folder / "docs/start/corpus.md").write_text(PAGE)
    return folder


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_the_commands_do_what_they_say(home, monkeypatch, capfd):
    monkeypatch.chdir(home)
    assert {command[0] for command in COMMANDS} >= {"prepare", "train", "embed", "search", "export", "evaluate"}
    for command in COMMANDS:
        encoders = dict.fromkeys(("models/minilm", "runs/demo/declutr/export"), "runs/mine/export")
        status = main([*(encoders.get(word, word) for word in command), *SIZES.get(command[0], [])])
        shown = "".join(capfd.readouterr())
        assert status == 0, f"{command}: {shown}"
        assert "DeprecationWarning" not in shown, f"{command}: {shown}"
        if command[0] == "train":
            planned = "--plan" in command
            assert ("planned from" if planned else "encoder in") in shown, shown
    exec(SNIPPET, names := {})
    np.testing.assert_allclose(names["embeddings"], np.load("embeddings.npy")[:1], atol=1e-5)


@pytest.mark.parametrize("row", [line for line in PAGE.splitlines() if "yaml" in line and line.startswith("| ")])
def test_the_commands_of_the_table_are_valid(row, monkeypatch):
    """Their configs and overrides are read, by the command that the column names."""
    monkeypatch.chdir(runs.ROOT)
    prepare, train = (shlex.split(cell.strip(" `")) for cell in row.split("|")[2:4])
    load_config(prepare[0], "prepare", PipelineConfig, [*prepare[1:], "corpus.paths=[my/texts]", "output=data/mine"])
    load_config(train[0], "train", TrainConfig, [*train[1:], "data=data/mine", "run=runs/mine"])
