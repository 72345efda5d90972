"""The commands and examples of the pages and the notebook, exactly as written there; the functions that scripts call.

The code cells run as a script, because a notebook's kernel is no requirement of this project.
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tinyruns as runs
import yaml
from mediafiles import png, sound, spread, tone
from messages import all_of, says
from processes import run_python
from tiny import VOCABULARY, documents

import declutr
from declutr.cli.main import main
from declutr.common.config import load_config
from declutr.common.storage import hash_file
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer.config import TrainConfig

PAGE = (runs.ROOT / "docs/start/corpus.md").read_text()
README = (runs.ROOT / "README.md").read_text()
MODALITIES = (runs.ROOT / "docs/guides/modalities.md").read_text()
TEXTS = (runs.ROOT / "docs/guides/texts.md").read_text()
PAIRS = TEXTS.split("\n## Sentences, pairs and triples\n")[1].split("\n## ")[0]
PYTHON = (runs.ROOT / "docs/reference/python.md").read_text()
NOTEBOOK = json.loads((runs.ROOT / "examples/adapt.ipynb").read_text())
COMMANDS = runs.commands_of(PAGE)
COMMANDS += [command for command in runs.commands_of(README) if command not in COMMANDS]
COMMANDS.sort(key=lambda command: command[0] == "adapt")  # last: it starts from the encoder that others train here
START = "sentence-transformers/all-MiniLM-L6-v2"
ENCODERS = dict.fromkeys(("models/minilm", START, "adapted/encoder", "runs/demo/declutr/export"), "runs/mine/export")
# What differs: everything is small, fewer rows are compared, and no training starts a group (other tests do).
SHAPE = "{model_type: roberta, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 48}"
SIZES = {"prepare": ["validation_fraction=0.1"], "train": [f"encoder.from_config={SHAPE}", "scaling.num_workers=0"]}
NUMBERS = "(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)"


def nightly(test):
    return pytest.mark.ray(pytest.mark.nightly(pytest.mark.usefixtures("session")(test)))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's folder, which has our configs and examples."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(runs.ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_the_commands_of_the_first_pages_do_what_they_say(home, capfd):
    (home / "pairs.jsonl").symlink_to(runs.ROOT / "examples/questions.jsonl")
    texts = {"sentences.txt": b"A sentence.\nAnd another one.\n", "docs/start/corpus.md": PAGE.encode()}
    spread(home, texts | {"my/texts/my.jsonl": b""})
    runs.write_corpus(home / "my/texts/my.jsonl", documents=40, words=(1200, 1600))
    assert {command[0] for command in COMMANDS} >= {"prepare", "train", "embed", "search", "export", "evaluate"}
    for command in COMMANDS:
        status = main([*(ENCODERS.get(word, word) for word in command), *SIZES.get(command[0], [])])
        output = "".join(capfd.readouterr())
        assert status == 0, f"{command}: {output}"
        assert "DeprecationWarning" not in output, f"{command}: {output}"
        if command[0] == "train":
            assert ("planned from" if "--plan" in command else "encoder in") in output, output
    code = [line.removeprefix("    ") for line in PAGE.splitlines() if line.startswith("    ")]
    exec("\n".join(line for line in code if not line.startswith("declutr ")), names := {})
    np.testing.assert_allclose(names["embeddings"], np.load("embeddings.npy")[:1], atol=1e-5)
    exec(README.split("```python\n")[1].split("```")[0].replace(START, ENCODERS[START]), names)  # after the command
    assert names["result"].sentence.strip() in capfd.readouterr().out


@pytest.mark.parametrize("row", [line for line in PAGE.splitlines() if "yaml" in line and line.startswith("| ")])
def test_the_commands_of_the_table_are_valid(row, monkeypatch):
    """Their configs and overrides are read, by the command that the column names."""
    monkeypatch.chdir(runs.ROOT)
    prepare, train = (shlex.split(cell.strip(" `")) for cell in row.split("|")[2:4])
    load_config(prepare[0], "prepare", PipelineConfig, [*prepare[1:], "corpus.paths=[my/texts]", "output=data/mine"])
    load_config(train[0], "train", TrainConfig, [*train[1:], "data=data/mine", "run=runs/mine"])


@nightly
def test_the_commands_of_media_do_what_they_say(home, capsys):
    """For a newcomer's pictures and sounds with labels, and sentences."""
    blocks = re.findall(r"```yaml\n(.*?)```", MODALITIES, re.DOTALL)
    task = {"data": "data/texts", "run": "runs/any", **yaml.safe_load(blocks[2])["train"]}
    config = TrainConfig.model_validate(task | {"encoder": {"pretrained": "x"}})
    assert config.auxiliary_tasks["image"].batch_documents == 48
    spread(home / "pictures", {f"{('cat', 'dog')[n % 2]}/{n:04}.png": png(n, (40, 36)) for n in range(50)})
    spread(home / "sounds", {f"{n % 5}_jackson_{n}.wav": sound(tone(0.3, 8000, n), 8000) for n in range(20)})
    lines = [f"Sentence {n} says that {n * 7919 % 101} birds saw {n * 31 % 17} cats." for n in range(400)]
    Path("sentences.txt").write_text("\n".join(lines) + "\n")
    for name, block in zip(("pictures", "sounds"), blocks, strict=False):
        Path(f"{name}.yaml").write_text(block)
    commands = runs.commands_of(MODALITIES)
    sizes = {"verify-gradients": ["--documents", "2", "--processes", "2"], "train": ["scaling.num_workers=0"]}
    names = "prepare prepare inspect report prepare report prepare verify-gradients train why"
    assert [command[0] for command in commands] == names.split()
    for command in commands:
        assert main([*command, *sizes.get(command[0], [])]) == 0, f"{command}: {capsys.readouterr()}"
    assert load_manifest(Path("data/pictures")).totals["kept"] == 50
    assert load_manifest(Path("data/sounds")).labels == {str(label): 4 for label in range(5)}
    assert all("image_supcon" in line for line in runs.steps_of("runs/visualcse-small").values())
    assert Path("runs/visualcse-small/export/model.safetensors").is_file()


@nightly
@pytest.mark.usefixtures("home")
def test_the_example_of_pairs_gives_what_the_page_says(capsys):
    (block,) = re.findall(r"```json\n(.*?)```", PAIRS, re.DOTALL)
    Path("pairs.jsonl").write_text(block)
    commands = runs.commands_of(PAIRS)
    assert [command[0] for command in commands] == ["prepare", "inspect", "report"]
    assert [main(command) for command in commands] == [0, 0, 0]
    manifest = load_manifest(Path("data/pairs"))
    assert (manifest.totals["kept"], manifest.dropped) == (2, {"no_gold_label": 1})
    assert manifest.labels == {"contradiction": 2, "entailment": 2, "neutral": 1}
    assert re.search(r"premise +\d+ tokens  A man plays a guitar\.", capsys.readouterr().out)


@pytest.mark.nightly
@pytest.mark.ray
def test_the_notebook_and_the_page_run_in_one_session_and_leave_the_process_as_it_was(tmp_path_factory):
    folder = tmp_path_factory.mktemp("py")  # short, for the sockets of Ray
    runs.write_corpus(folder / "documents.jsonl", documents=12, words=(200, 300))
    examples = re.findall(r"^```python\n(.*?)^```$", PYTHON, re.MULTILINE | re.DOTALL)
    assert len(examples) == 8
    script = "\n".join(
        [
            f"import os, signal\nbefore = [signal.getsignal(number) for number in {NUMBERS}], os.getpid()",
            *("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"),
            "import ray\nsession = ray.get_runtime_context().get_job_id()",
            "import logging\nlogging.getLogger('declutr').setLevel('ERROR')\nimport sys\nsys.stderr.write('--quiet--')",
            *examples,
            f"assert before == ([signal.getsignal(number) for number in {NUMBERS}], os.getpid())",
            "assert ray.get_runtime_context().get_job_id() == session",
        ]
    )
    done = run_python("-c", script, folder=folder, env={"TMPDIR": str(folder)})
    output = done.stdout.splitlines()
    stored = [line for cell in NOTEBOOK["cells"] for out in cell.get("outputs", ()) for line in out["text"]]
    assert [line.split(" ", 1)[1] for line in output[:1]] == [line.split(" ", 1)[1].strip() for line in stored[:1]]
    says(output, "recall@1", "closed form")
    says(output, "minuts", "minutes")
    assert not done.stderr.split("--quiet--")[1].splitlines()


def test_the_page_names_every_public_function_and_settings_of_a_caller_are_not_changed(tmp_path):
    assert [name for name in declutr.__all__ if not re.search(rf"\b{name}\b", PYTHON)] == []
    assert [name for name in declutr.__all__ if not callable(getattr(declutr, name))] == []
    with pytest.raises(AttributeError, match="prepair"):
        _ = declutr.prepair
    settings = {"output": tmp_path / "out", "corpus": {"kind": "files", "paths": (tmp_path / "no.jsonl",)}}
    before = repr(settings)
    with pytest.raises(declutr.ConfigError, match=all_of("no.jsonl")):
        declutr.prepare(settings, ["tokenizer={kind: train, vocab_size: 500}", "corpus.format=jsonl"])
    assert repr(settings) == before


RUN = {"run": "r", "data": "nowhere"}


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: declutr.prepare({"prepare": {"output": "x"}}), ("prepare", "name of the section")),
        (lambda: declutr.prepare({"output": 3, "corpus": {"kind": "files"}}), "output = 3"),
        (lambda: declutr.prepare(Path("nowhere.yaml")), "nowhere.yaml"),
        (lambda: declutr.prepare([1]), ("list", "dict")),
        (lambda: declutr.train(RUN, "steps=3"), ("overrides", "['steps=3']")),
        (lambda: declutr.train(RUN, {"steps": 3}), ("overrides", "['steps=3']")),
        (lambda: declutr.adapt("models/x", [{"text": "a"}], "out"), ("not dict", "name a file")),
        (lambda: declutr.train(RUN | {"steps": 0}), "steps = 0"),
        (lambda: declutr.train(RUN), "nowhere"),
        (lambda: declutr.adapt("models/x", [], "out"), ("CORPUS", "--passages")),
        (lambda: declutr.adapt("models/x", "docs", "out", minutes=-1, sead=2), ("sead", "seed")),
        (lambda: declutr.embed("hashed-words:8", "in.txt", "out.npy", normalize=True), ("normalize", "normalise")),
        (lambda: declutr.embed("hashed-words:8", "in.txt", "out.csv"), ("out.csv", ".parquet")),
        (lambda: declutr.embed("./nowhere", "in.txt", "out.npy"), "nowhere"),
        (lambda: declutr.adapt("models/x", "docs", None), "output = None: name a file or a folder"),
        (lambda: declutr.export("models/x", None), "output = None: name a file or a folder"),
        (lambda: declutr.index("e.parquet", None), "output = None: name a file or a folder"),
        (lambda: declutr.load("models/x", precision="fp16"), ("precision = 'fp16'", "'auto', 'fp32' or 'bf16'")),
        (lambda: declutr.load("models/x", "average", long_texts="split"), ("long_texts = 'split'", "'windows'")),
        (lambda: declutr.load("models/x", "average"), ("pooling = 'average'", "'mean', 'cls', 'max'")),
        (lambda: declutr.load("models/x", max_tokens="many"), ("max_tokens = 'many'", "integer")),
        (lambda: declutr.load("hashed-words:8").encode("one text"), "encode([text])"),
        (lambda: declutr.load("hashed-words:8").encode(["a", None]), "texts[1]"),
    ],
)
def test_wrong_calls_are_told_with_their_remedy(tmp_path, monkeypatch, capfd, call, facts):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError), match=all_of(facts)):
        call()
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_level_of_the_logger_silences_bars(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("a text\n")
    for level, bar in (("INFO", "embed 100%"), ("WARNING", "")):
        with caplog.at_level(level, logger="declutr"):
            declutr.embed("hashed-words:8", "in.txt", f"{level}.npy")
        errors = capfd.readouterr().err
        assert bar in errors
        assert bool(errors) == bool(bar)
        assert Path(f"{level}.npy").exists()


OBJECTIVE = (runs.ROOT / "docs/guides/new-objective.md").read_text()


def runs_ray(test):
    return pytest.mark.ray(pytest.mark.dist(pytest.mark.nightly(test)))


def write_package(folder):
    written = re.findall(r"^`(\S+)`\n\n```\w+\n(.*?)^```$", OBJECTIVE, re.MULTILINE | re.DOTALL)
    for name, text in written:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert len(written) == 4


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder for PYTHONPATH with the package, its metadata and its entry point."""
    source, target = tmp_path_factory.mktemp("halves"), tmp_path_factory.mktemp("site")
    write_package(source)
    (arguments,) = re.findall(r"^    pip install (.*) \./halves$", OBJECTIVE, re.MULTILINE)
    pip = [sys.executable, "-m", "pip", "install", "-q", *arguments.split(), "--target", str(target), str(source)]
    subprocess.run(pip, check=True)
    return target


@pytest.fixture(scope="module")
def config(data, tmp_path_factory):
    """The objective that docs/guides/new-objective.md builds, extracted from the page, installed by pip, and run."""
    folder = tmp_path_factory.mktemp("runs")
    values = runs.train_values(data, folder / "run", encoder={"dropout": 0.1}, steps=12, checkpoint={"every_steps": 4})
    return runs.write_config(folder / "config.yaml", train=values)


def command(installed, name, config, *settings):
    halves = "objective.kind=halves", "validation.every_steps=0"
    options = runs.command("declutr.cli.main", config, *halves, *settings)
    options["args"].insert(3, name)
    options["env"]["PYTHONPATH"] = os.pathsep.join([str(runs.ROOT / "src"), str(installed)])
    return options


def run_to_end(*arguments, status=0):
    done = subprocess.run(**command(*arguments), timeout=200, check=False)
    assert done.returncode == status, done.stderr[-3000:]
    return done


def test_the_collator_of_the_page_packs_the_halves_of_a_document(tmp_path, monkeypatch):
    write_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    collator = importlib.import_module("halves.objective").HalvesCollator(VOCABULARY, span_tokens=4, seed=0)
    rows = documents([6, 20], max_tokens=4)
    batch = collator.collate(rows, np.zeros(2, np.int64))
    spans = [span.tolist() for span in batch.spans.input_ids.split(batch.spans.lengths.tolist())]
    tokens = [row.as_py() for row in rows.column("tokens")]
    parts = [tokens[0][:3], tokens[0][3:6], tokens[1][:4], tokens[1][4:8]]
    assert spans == [[VOCABULARY.bos, *part, VOCABULARY.eos] for part in parts]


@runs_ray
def test_new_objective_trains_and_continues_after_a_kill(installed, config, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_to_end(installed, "train", config, f"run={whole}")
    steps = runs.steps_of(whole)
    assert list(steps) == list(range(1, 13))
    assert all(line["loss"] == pytest.approx(line["invariance"] + line["variance"]) for line in steps.values())

    arguments = installed, "train", config, f"run={killed}", "scaling.num_workers=0"
    runs.kill_at_checkpoint(command(*arguments), killed, 4)
    run_to_end(*arguments)
    assert runs.steps_of(killed) == steps
    for name in ("encoder.safetensors", "optimizer.safetensors", "objective.safetensors"):
        sums = [hash_file(run / "checkpoints" / "step-00000012" / name) for run in (whole, killed)]
        assert sums[0] == sums[1], name
    assert "trained with halves of documents" in (killed / "export" / "README.md").read_text()


@runs_ray
def test_its_gradients_do_not_depend_on_workers_and_its_problems_are_found_before_ray_starts(installed, config):
    output = run_to_end(installed, "verify-gradients", config, "--processes", "2").stdout
    assert "float64" in output
    assert "APART" not in output
    done = run_to_end(installed, "train", config, "batch_documents=1", status=1)
    says(done.stderr, "batch_documents = 1", "halves", "at least 2")
