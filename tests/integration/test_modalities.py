"""The commands of docs/guides/modalities.md and texts.md as written there; texts in five scripts to a score."""

import json
import random
import re

import numpy as np
import pytest
import tinyruns as runs
import yaml
from mediafiles import png, sound, spread, tone
from translations import write_translations

from declutr.cli.main import main
from declutr.encoders.loading import load_encoder
from declutr.pipeline.shards.manifest import MANIFEST, load_manifest
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


LETTERS = {
    "de": "abcdefgäöüß",
    "ru": "абвгдежзиклмн",
    "zh": "人工智能正在改变我们的生活许多使用它写作翻译",
    "ja": "あいうえおかきくけこ東京都",
    "ar": "ابتثجحخدذرزس",
}


def write_corpus(folder):
    """Documents of words that share a topic; Chinese and Japanese without spaces."""
    rng = random.Random(0)
    for language, letters in LETTERS.items():
        gap, stop = ("", "。") if language in ("zh", "ja") else (" ", ". ")
        known = ["".join(rng.choices(letters, k=rng.randint(2, 5))) for _ in range(80)]
        (folder / language).mkdir(parents=True)
        for number in range(24):
            topic = rng.sample(known, 20)
            sentences = (gap.join(rng.choices(topic, k=9)) for _ in range(14))
            (folder / language / f"{number}.txt").write_text(stop.join(sentences), encoding="utf-8")
    return folder


def test_from_texts_to_a_score(tmp_path):
    corpus, config = write_corpus(tmp_path / "corpus"), runs.ROOT / "configs/multilingual.yaml"
    small = [
        f"corpus.paths=[{corpus}]",
        f"output={tmp_path / 'data'}",
        "tokenizer.vocab_size=500",
        "geometry.max_tokens=16",
    ]
    assert main(["prepare", str(config), *small, "session.num_cpus=1"]) == 0
    manifest = json.loads((tmp_path / "data" / MANIFEST).read_text())
    assert manifest["totals"]["kept"] > 100
    assert manifest["tokenizer"]["vocab_size"] == 500
    size = [f"encoder.from_config.{name}={value}" for name, value in (("hidden_size", 32), ("num_hidden_layers", 2))]
    size += ["encoder.from_config.intermediate_size=48", "encoder.from_config.num_attention_heads=2"]
    size += ["encoder.from_config.max_position_embeddings=24", "spans.max_tokens=16", "spans.min_tokens=4"]
    size += ["batch_documents=8", "epochs=null", "steps=4", "scaling.num_workers=0"]
    assert main(["train", str(config), f"data={tmp_path / 'data'}", f"run={tmp_path / 'run'}", *size]) == 0
    sets = write_translations(tmp_path / "sets", rows=12, languages=("de", "zh"))
    given = ["--data", str(sets), "--allow-unchecked", "--output", str(tmp_path / "s"), "--tasks", "STS-B-de,STS-B-zh"]
    assert main(["evaluate", str(tmp_path / "run"), *given]) == 0
    told = json.loads((tmp_path / "s/scores.json").read_text())["encoders"][0]["protocols"]["senteval"]["results"]
    assert set(told) == {"STSBenchmark-de", "STSBenchmark-zh"}
    embeddings = load_encoder(str(tmp_path / "run"), device="cpu").encode(["人工智能", "абвг", "", "ابت"])
    assert np.isfinite(embeddings).all()
    assert len(np.unique(embeddings, axis=0)) == 4
