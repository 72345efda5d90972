"""Texts for runs of SimCSE, SCD and SCL, and a run that goes on with other numbers of workers."""

import json
import random
import shutil

from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.train import train

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


def whole_run(folder, values_of):
    """Trains 12 steps on two workers, with a checkpoint every 4.

    `values_of(run, **settings)` are the values of a configuration. Returns the folder, and the function `values(run,
    workers)` for further runs of the same steps.
    """

    def values(run, workers=2):
        return values_of(run, steps=12, checkpoint={"every_steps": 4}, scaling={"num_workers": workers})

    train(TrainConfig.model_validate(values(folder)))
    return folder, values


def change_workers(whole, run, values):
    """Continues a copy of a `whole_run` from step 4 with three workers, and from step 8 with one.

    The later part of a run is removed as a kill would leave it.
    """
    shutil.copytree(whole, run)
    for workers, done in ((3, 4), (1, 8)):
        for later in (run / "checkpoints").glob("step-*"):
            if int(later.name.split("-")[1]) > done:
                shutil.rmtree(later)
        (run / "summary.json").unlink()
        shutil.rmtree(run / "export")
        train(TrainConfig.model_validate(values(run, workers)))
