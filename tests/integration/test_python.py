"""The functions of the package as scripts call them, and the examples of the page and the notebook in one process.

The code cells run as a script, because a notebook's kernel is no requirement of this project.
"""

import json
import re
from pathlib import Path

import pytest
import tinyruns as runs
from messages import all_of, says
from processes import run_python

import declutr

PAGE = (runs.ROOT / "docs" / "reference" / "python.md").read_text()
NOTEBOOK = json.loads((runs.ROOT / "examples" / "adapt.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
NUMBERS = "(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)"


@pytest.mark.nightly
@pytest.mark.ray
def test_the_notebook_and_the_page_run_in_one_session_and_leave_the_process_as_it_was(tmp_path_factory):
    folder = tmp_path_factory.mktemp("py")  # short, for the sockets of Ray
    runs.write_corpus(folder / "documents.jsonl", documents=12, words=(200, 300))
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == 8
    script = "\n".join(
        [
            f"import os, signal\nbefore = [signal.getsignal(number) for number in {NUMBERS}], os.getpid()",
            *CELLS,
            "import ray\nsession = ray.get_runtime_context().get_job_id()",
            "import logging\nlogging.getLogger('declutr').setLevel('ERROR')\nimport sys\nsys.stderr.write('--quiet--')",
            *examples,
            f"assert before == ([signal.getsignal(number) for number in {NUMBERS}], os.getpid())",
            "assert ray.get_runtime_context().get_job_id() == session",
        ]
    )
    done = run_python("-c", script, folder=folder, env={"TMPDIR": str(folder)})
    shown = done.stdout.splitlines()
    stored = [line for cell in NOTEBOOK["cells"] for out in cell.get("outputs", ()) for line in out["text"]]
    assert [line.split(" ", 1)[1] for line in shown[:1]] == [line.split(" ", 1)[1].strip() for line in stored[:1]]
    says(shown, "recall@1", "closed form")
    says(shown, "minuts", "minutes")
    assert not done.stderr.split("--quiet--")[1].splitlines()


def test_the_page_names_every_public_function_and_error():
    assert [name for name in declutr.__all__ if not re.search(rf"\b{name}\b", PAGE)] == []
    assert [name for name in declutr.__all__ if not callable(getattr(declutr, name))] == []
    with pytest.raises(AttributeError, match="prepair"):
        _ = declutr.prepair


def test_settings_of_a_caller_are_not_changed_and_paths_are_taken(tmp_path):
    settings = {"output": tmp_path / "out", "corpus": {"kind": "files", "paths": (tmp_path / "no.jsonl",)}}
    before = repr(settings)
    with pytest.raises(declutr.ConfigError, match=all_of("no.jsonl")):
        declutr.prepare(settings, ["tokenizer={kind: train, vocab_size: 500}", "corpus.format=jsonl"])
    assert repr(settings) == before


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: declutr.prepare({"prepare": {"output": "x"}}), ("prepare.output", "unknown key")),
        (lambda: declutr.prepare({"output": 3, "corpus": {"kind": "files"}}), ("output = 3",)),
        (lambda: declutr.prepare(Path("nowhere.yaml")), ("nowhere.yaml",)),
        (lambda: declutr.prepare([1]), ("list", "dict")),
        (lambda: declutr.train({"run": "r", "data": "nowhere"}, "steps=3"), ("overrides", "['steps=3']")),
        (lambda: declutr.train({"run": "r", "data": "nowhere", "steps": 0}), ("steps = 0",)),
        (lambda: declutr.train({"run": "r", "data": "nowhere"}), ("nowhere",)),
        (lambda: declutr.adapt("models/x", [], "out"), ("CORPUS", "--passages")),
        (lambda: declutr.adapt("models/x", "docs", "out", minutes=-1, sead=2), ("sead", "seed")),
        (lambda: declutr.embed("hashed-words:8", "in.txt", "out.npy", normalize=True), ("normalize", "normalise")),
        (lambda: declutr.embed("hashed-words:8", "in.txt", "out.csv"), ("out.csv", ".parquet")),
        (lambda: declutr.embed("./nowhere", "in.txt", "out.npy"), ("nowhere",)),
        (lambda: declutr.load("./nowhere"), ("nowhere",)),
        (lambda: declutr.load("~no-such-user/x"), ("~no-such-user",)),
        (lambda: declutr.load("hashed-words:8").encode("one text"), ("encode([text])",)),
        (lambda: declutr.load("hashed-words:8").encode(["a", None]), ("texts[1]",)),
    ],
)
def test_wrong_calls_are_told_with_their_remedy(tmp_path, monkeypatch, capfd, call, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError), match=all_of(*told)):
        call()
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_level_of_the_logger_silences_bars(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("a text\n")
    for level, bar in (("INFO", "embed 100%"), ("WARNING", "")):
        with caplog.at_level(level, logger="declutr"):
            declutr.embed("hashed-words:8", "in.txt", f"{level}.npy")
        shown = capfd.readouterr().err
        assert bar in shown
        assert bool(shown) == bool(bar)
        assert Path(f"{level}.npy").exists()
