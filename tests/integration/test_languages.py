"""The multilingual config on a tiny corpus in five scripts: prepare, train, export, and STS-B in one language."""

import json
import random

import numpy as np
import pytest
import tinyruns as runs
from translations import write_translations

from declutr.cli.main import main
from declutr.encoders.loading import load_encoder
from declutr.pipeline.shards.manifest import MANIFEST

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]

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
