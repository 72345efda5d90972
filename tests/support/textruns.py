"""Texts for runs of SimCSE, SCD and SCL."""

import json
import random

LABELS = ("entailment", "neutral", "contradiction")
SCD = {
    "kind": "scd",
    "dropout_rates": [0.05, 0.2],
    "projector": [24, 16],
    "max_tokens": 16,
    "decorrelation_weight": 0.05,
}
SCL = {"kind": "scl", "contrastive_weight": 0.3, "max_tokens": 16, "negatives": 5}
SIMCSE = {"kind": "simcse", "max_tokens": 16}


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
