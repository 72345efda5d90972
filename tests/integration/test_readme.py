"""Runs the commands of the README for a user's own corpus, exactly as they are written there."""

import os
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest
import tinyruns as runs
from sentevalsets import write_sets
from transformers import AutoTokenizer

from cli.main import main
from trainer.model.language_model import build_model, load_hf_config
from trainer.model.settings import EncoderConfig

SECTION = (runs.ROOT / "README.md").read_text().split("\n## Your own corpus\n")[1].split("\n## ")[0]
BLOCK = [line.removeprefix("    ") for line in SECTION.splitlines() if line.startswith("    ")]
COMMANDS = [shlex.split(line, comments=True)[1:] for line in BLOCK if line.startswith("declutr ")]
SNIPPET = "\n".join(line for line in BLOCK if not line.startswith("declutr "))
# What differs: everything is small.
SIZES = {
    "prepare": ["held_out_share=0.1"],
    "verify-gradients": ["--documents", "2", "--processes", "2"],
    "evaluate": ["--allow-unchecked", "--tasks", "SST2,STS12"],
}


@pytest.fixture(scope="module")
def home(data, tmp_path_factory):
    """A user's folder: our configs, texts, an encoder in the place of distilroberta-base, SentEval's data."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "configs").symlink_to(runs.ROOT / "configs")
    (folder / "my/texts").mkdir(parents=True)
    runs.write_corpus(folder / "my/texts/my.jsonl", documents=40, words=(1200, 1600))
    (folder / "sentences.txt").write_text("A sentence.\nAnd another one.\n")
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    encoder = EncoderConfig(scratch={**runs.SCRATCH, "max_position_embeddings": 514})
    model = build_model(encoder, load_hf_config(encoder, len(tokenizer), ids), seed=0)
    model.save_pretrained(folder / "distilroberta-base")
    tokenizer.save_pretrained(folder / "distilroberta-base")
    write_sets(folder / "senteval")
    return folder


def type_in(command, folder):
    """Runs it in a process of its own; one that serves is interrupted once it says where."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(runs.ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )
    shown = ""
    for line in process.stdout:
        shown += line
        if command[0] == "explore" and "http://" in line:
            process.send_signal(signal.SIGINT)
    return process.wait(timeout=60), shown


@pytest.mark.ray
@pytest.mark.slow
def test_the_commands_do_what_they_say(home, monkeypatch, capfd):
    monkeypatch.chdir(home)
    assert {command[0] for command in COMMANDS} >= {"prepare", "train", "embed", "index", "explore", "evaluate"}
    for command in COMMANDS:
        given = [*command, *SIZES.get(command[0], [])]
        if command[0] in ("prepare", "train", "explore"):  # starts Ray, or serves
            status, shown = type_in(given, home)
        else:
            status = main(given)
            shown = "".join(capfd.readouterr())
        assert status == 0, f"{command}: {shown}"
        assert "DeprecationWarning" not in shown, f"{command}: {shown}"
    exec(SNIPPET, names := {})
    np.testing.assert_allclose(names["embeddings"], np.load("embeddings.npy")[:1], atol=1e-5)
