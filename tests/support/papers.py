"""A tiny item of `declutr reproduce` with shards that no Ray prepares."""

import random

import yaml
from prepared import Row, write_prepared
from sentevaldata import write_sets
from tinyruns import train_values

from declutr.cli.main import main

WORDS = ["".join(pair) for pair in zip("abcdefghijklmno" * 2, "pqrstuvwxyzabcd" * 2, strict=True)][:24]


def write_item(folder):
    """Writes shards, SentEval's tasks, a training config and the file of an item; returns the path of the item."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(90, 140))) + f" {number}" for number in range(96)]
    rows = [Row(text, "held-out" if number % 8 == 0 else "train") for number, text in enumerate(texts)]
    write_prepared(folder / "shards", [rows], geometry={"num_anchors": 2, "max_tokens": 16})
    write_sets(folder / "data" / "senteval")
    validation = {"every_steps": 2, "stsb": "$DECLUTR_SENTEVAL/downstream/STS/STSBenchmark"}
    changes = {"encoder": {"dropout": 0.1}, "validation": validation, "scaling": {"num_workers": 0}}
    values = train_values(folder / "shards", "unused", steps=4, checkpoint={"every_steps": 1}, **changes)
    (folder / "train.yaml").write_text(yaml.safe_dump({"train": values}))
    axes = {"terms": {"both": {}, "mlm": {"objective.terms": "mlm"}}}
    axes["share"] = {"100%": {}, "50%": {"data_fraction": 0.5}}
    item = {"title": "Terms and share", "source": "a paper, Figure 1", "says": "Both terms are best.", "axes": axes} | {
        "columns": {"STS-B": {"tasks": ["STSBenchmark"], "number": "all"}},
        "printed": {"both, 100%": {"STS-B": 80.5}},
        "scales": {"tiny": {"config": str(folder / "train.yaml"), "seeds": [0, 1]}},
    }
    return _written(folder / "terms.yaml", item)


def _written(path, item):
    path.write_text(yaml.safe_dump(item, sort_keys=False))
    return path


def arguments(item, work, *more, checked=False):
    words = [str(item), "--scale", "tiny", "--data", str(item.parent / "data"), "--work", str(work), *more]
    return words if checked else [*words, "--allow-unchecked"]


def changed(item, name, scale=(), **keys):
    values = yaml.safe_load(item.read_text()) | {"printed": {}} | keys
    if scale:
        values["scales"]["tiny"] |= scale
    return _written(item.with_name(f"{name}.yaml"), values)


def refusal(capsys, *words):
    capsys.readouterr()
    assert main(["reproduce", *map(str, words)]) == 1
    return capsys.readouterr().err.splitlines()[-1]
