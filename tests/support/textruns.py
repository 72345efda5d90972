"""Texts for runs of SimCSE, SCD and SCL; images and sounds for auxiliary tasks beside them."""

import json
import random

from mediafiles import png, sound, tone

LABELS = ("entailment", "neutral", "contradiction")
SCD = {"kind": "scd", "dropout_rates": [0.05, 0.2], "projector": [24, 16], "max_tokens": 16}
SCD["decorrelation_weight"] = 0.05
SCL = {"kind": "scl", "contrastive_weight": 0.3, "max_tokens": 16, "negatives": 5}
SIMCSE = {"kind": "simcse", "max_tokens": 16}
PAIRS = {"kind": "pairs", "required_labels": ["entailment", "contradiction"]}
IMAGES = {"kind": "images", "shortest_edge": 18}
SOUNDS = {"kind": "audio", "sample_rate": 8000, "num_mel_bins": 20, "max_seconds": 1, "label": r"^(\d)_"}
IMAGE = {"objective": {"kind": "supcon"}, "batch_documents": 6, "frontend": {"image_size": 16, "patch_size": [8, 8]}}
PATCHES = {"patch_size": [8, 8], "mean": -4.0, "std": 4.0}
AUDIO = {"objective": {"kind": "supcon"}, "batch_documents": 5, "frontend": PATCHES}


def pictures():
    return {f"{'abc'[n % 3]}/{n}.png": png(n, (20 + n % 5, 18)) for n in range(40)}


def clips():
    return {f"{n % 4}_{n}.wav": sound(tone(0.1 + 0.01 * (n % 7), 8000, n), 8000) for n in range(36)}


def write_texts(folder):
    """Sentences, one a line; pairs of 60 premises; STS-B's file."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 6))) for _ in range(200)]

    def sentence(most=14):
        return " ".join(rng.choices(words, k=rng.randint(3, most)))

    (folder / "sentences.txt").write_text("".join(f"{sentence()} {number}\n" for number in range(240)))
    with (folder / "pairs.jsonl").open("w") as stream:
        for number in range(60):
            premise = f"{sentence()} {number}"
            for label in (*LABELS, rng.choice(LABELS)):
                stream.write(json.dumps({"premise": premise, "hypothesis": sentence(8), "label": label}) + "\n")
    lines = [f"a\tb\tc\t{number}\t{rng.uniform(0, 5):.2f}\t{sentence()}\t{sentence()}" for number in range(30)]
    (folder / "sts-dev.csv").write_text("\n".join(lines) + "\n")
