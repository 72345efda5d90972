"""Compares what this checkout computes with what another commit computes on this machine: `make frozen`.

Weights, shards, scores and adaptations depend on the processor, so that they cannot be stored. Both checkouts run the
same commands in processes of their own. This one also continues, reads and searches what the other has written. What
does not depend on the processor is in `test_frozen.py`.

    python tests/frozen.py [--commit cb156041] [--folder build/frozen] [--only NAME ...]

It prints a line for each comparison, and its status is 1 if one differs.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import yaml
from transformers import BertConfig, BertModel, BertTokenizerFast, set_seed

sys.path.insert(0, str(Path(__file__).resolve().with_name("support")))
from mediafiles import spread
from nanofiles import rows_of, write_test
from textruns import IMAGE, IMAGES, PAIRS, SCD, SCL, SIMCSE, SOUNDS, clips, pictures, write_texts
from tinyruns import FROM_CONFIG, kill_at_checkpoint, write_corpus
from vocabularies import wordpiece_backend

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
STEPS, KILLED = 12, 6


def write_inputs(folder):
    """Everything that the commands read: texts, pairs, pictures, judged queries, an encoder."""
    folder.mkdir(parents=True)
    write_corpus(folder / "documents.jsonl")
    write_texts(folder)
    spread(folder / "pictures", pictures())
    spread(folder / "sounds", clips())
    write_test(folder / "nano" / "nanobeir", *rows_of(0))
    texts = [json.loads(line)["text"] for line in (folder / "documents.jsonl").read_text().splitlines()]
    rng = random.Random(1)
    rows = [{"query": " ".join(rng.sample(text.split(), 4)), "text": " ".join(text.split()[:20])} for text in texts]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = wordpiece_backend([*texts, " ".join("abcdefghijklmnopqrstuvwxyz0123456789.,;:-()'\"")], 600)
    BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=128).save_pretrained(folder / "encoder")
    set_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    sizes |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 128}
    BertModel(BertConfig(**sizes)).save_pretrained(folder / "encoder")


def digest(*paths):
    return hashlib.sha256(b"".join(Path(path).read_bytes() for path in paths)).hexdigest()[:16]


def numbers(value):
    """A result without places, times and hardware: what must be equal."""
    if isinstance(value, dict):
        left_out = "seconds|path|commit|version|hardware|date|time|output|encoder|run|data"
        left_out += "|items"  # errors of test items, which the other commit does not store
        items = [(key, item) for key, item in value.items() if not re.search(left_out, key.lower())]
        return {re.sub(r"/\S+", "", key): numbers(item) for key, item in items}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return value if isinstance(value, int | float | None) else re.sub(r"/\S+", "", str(value))


class Checkout:
    """Commands of a checkout at `root`, with the inputs of `write_inputs`, and results in `folder`."""

    def __init__(self, root, inputs, folder):
        self.root, self.inputs, self.folder = root, inputs, folder
        folder.mkdir(parents=True, exist_ok=True)

    def command(self, *arguments):
        """A command in a session of its own, as for Popen."""
        environment = os.environ | {"PYTHONPATH": str(self.root / "src"), "PYTHONWARNINGS": "ignore"}
        environment |= {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_VNNI"  # cb156041 takes float32 on every CPU
        output = (self.folder / "log.txt").open("a")
        print("$ declutr", *arguments, file=output, flush=True)
        line = [sys.executable, "-m", "declutr.cli.main", *map(str, arguments)]
        place = {"cwd": self.folder, "env": environment, "start_new_session": True, "text": True}
        return {"args": line, "stdout": subprocess.PIPE, "stderr": output, **place}

    def run(self, *arguments):
        """What a command prints, once it has ended well."""
        done = subprocess.run(**self.command(*arguments), timeout=1800, check=False)
        assert done.returncode == 0, f"{self.root}: declutr {' '.join(map(str, arguments))}: {self.folder}/log.txt"
        return done.stdout

    def configured(self, command, name, values):
        path = self.folder / f"{name}-{command}.yaml"
        path.write_text(yaml.safe_dump({command: values}))
        return self.run(command, path)

    def prepare(self, name, source, content=None, tokenizer=None, **changes):
        values = {"output": str(self.folder / name), "corpus": {"kind": "files", "paths": [str(s) for s in source]}}
        values |= {"validation_fraction": 0.2, "unit_mib": 4, "session": {"num_cpus": 2}, **changes}
        if tokenizer != "none":
            values["tokenizer"] = tokenizer or {"kind": "train", "vocab_size": 400, "sample_mib": 0.1}
        if content:
            values["content"] = content
        self.configured("prepare", name, values)
        shards = sorted((self.folder / name).rglob("*.arrow"))
        assert shards
        return digest(*shards)

    def train_values(self, name, data, objective, workers=1, **changes):
        values = {"run": str(self.folder / name), "data": str(self.folder / data), "steps": STEPS, "batch_documents": 8}
        values |= {"encoder": {"from_config": FROM_CONFIG, "dropout": 0.1}, "optim": {"lr": 0.001}}
        values |= {"objective": objective, "checkpoint": {"every_steps": 3, "keep_last": 9}}
        values |= {"validation": {"every_steps": 4}}
        if objective["kind"] == "declutr":
            values["spans"] = {"num_anchors": 2, "num_positives": 2, "min_tokens": 4, "max_tokens": 16}
        return values | {"scaling": {"num_workers": workers, "device": "cpu", "data_cpus": 1}} | changes

    def weights(self, name):
        """Digest of the tensors of the last checkpoint, and of those of the export."""
        last = max((self.folder / name / "checkpoints").glob("step-*"))
        return digest(*sorted(last.glob("*.safetensors"))), digest(self.folder / name / "export" / "model.safetensors")

    def train(self, name, *arguments, **changes):
        self.configured("train", name, self.train_values(name, *arguments, **changes))
        return self.weights(name)

    def train_killed(self, name, *arguments, **changes):
        """Trains, with a kill of every process after a checkpoint in the middle; returns the weights."""
        changes |= {"steps": 400}  # there is time for the kill
        path = self.folder / f"{name}-train.yaml"
        path.write_text(yaml.safe_dump({"train": self.train_values(name, *arguments, **changes)}))
        kill_at_checkpoint(self.command("train", path), self.folder / name, KILLED)
        cut(self.folder / name)
        return self.train(name, *arguments, **changes)


def cut(run):
    for later in sorted((run / "checkpoints").glob("step-*")):
        if int(later.name[5:]) > KILLED:
            shutil.rmtree(later)


DECLUTR = {"kind": "declutr"}
RUNS = {  # data and objective of each kind of run
    "declutr": ("documents", DECLUTR), "simcse": ("sentences", SIMCSE),
    "supervised": ("pairs", SIMCSE | {"supervised": True}), "scd": ("sentences", SCD), "scl": ("pairs", SCL),
    "image": ("sentences", SIMCSE),
}  # fmt: skip


def compute(checkout):
    inputs, folder = checkout.inputs, checkout.folder
    shards = {"kind": "pretrained", "name": str(folder / "sentences" / "tokenizer")}
    short = {"unit_mib": 0.05, "geometry": {"num_anchors": 2, "max_tokens": 16}}
    yield "shards documents", lambda: checkout.prepare("documents", [inputs / "documents.jsonl"], **short)
    yield "shards sentences", lambda: checkout.prepare("sentences", [inputs / "sentences.txt"], "sentences")
    yield "shards pairs", lambda: checkout.prepare("pairs", [inputs / "pairs.jsonl"], PAIRS, shards)
    yield "shards images", lambda: checkout.prepare("images", [inputs / "pictures"], IMAGES, "none")
    yield "shards sounds", lambda: checkout.prepare("sounds", [inputs / "sounds"], SOUNDS, "none")
    for name, run in RUNS.items():
        tasks = {"image": {"data": str(folder / "images"), **IMAGE}}
        changes = {"task_schedule": "joint", "auxiliary_tasks": tasks} if name == "image" else {}
        for workers in (1, 2):
            train = partial(checkout.train, f"{name}-{workers}", *run, workers, **changes)
            yield f"weights {name}, {workers} workers", train
    yield "weights declutr, killed at step 6", partial(checkout.train_killed, "declutr-killed", *RUNS["declutr"], 2)

    export = folder / "declutr-1" / "export"

    def embedded():
        vectors, options = folder / "vectors.npy", ("--precision", "fp32")
        checkout.run("embed", export, inputs / "queries.jsonl", "--output", vectors, *options)
        checkout.run("index", vectors, "--output", folder / "index", "--hybrid")
        return digest(vectors), searched(checkout, folder / "index")

    yield "embeddings and search", embedded

    def evaluated(*arguments):
        output = folder / f"scores-{arguments[0].strip('-')}"
        checkout.run("evaluate", export, *arguments, "--output", output)
        return numbers([json.loads(path.read_text()) for path in sorted(output.rglob("*.json"))])

    def pairs():
        evaluated("--pairs", inputs / "queries.jsonl")
        scores = json.loads((folder / "scores-pairs" / "pairs.json").read_text())["scores"]
        # of the encoder alone: equal scores of words have another place since f0c1218c, and intervals other rows
        (row,) = [row for name, row in scores.items() if name.endswith("export")]
        return {measure: fact["value"] for measure, fact in row.items()}

    yield "scores of pairs", pairs
    yield "scores of NanoBEIR", lambda: evaluated("--data", inputs / "nano", "--tasks", "NanoNQ", "--allow-unchecked")
    if SHARED.is_dir():
        senteval = ("--data", SHARED / "senteval", "--tasks", "STS12,SICKRelatedness,TREC,STSBenchmark")
        yield "scores of SentEval", lambda: evaluated(*senteval, "--preset", "prototyping", "--allow-unchecked")
        roberta = {"kind": "pretrained", "name": str(SHARED / "tokenizers" / "roberta-base")}
        corpora = sorted((SHARED / "corpus").glob("*.jsonl.gz"))
        yield "shards of the shared corpora", lambda: checkout.prepare("corpora", corpora, None, roberta, unit_mib=32)
        wiki = [SHARED / "wiki" / "wiki_sentences_xprobe_en.txt"]
        yield "shards of shared sentences", lambda: checkout.prepare("wiki", wiki, "sentences", roberta)
        nli = sorted((SHARED / "nli").glob("snli_train*"))
        yield "shards of shared pairs", lambda: checkout.prepare("nli", nli, PAIRS, roberta)
        cifar = [SHARED / "images" / "cifar10_small"]
        yield "shards of shared images", lambda: checkout.prepare("cifar", cifar, {"kind": "images"}, "none")
        speech = {"kind": "audio", "sample_rate": 8000, "max_seconds": 1, "label": r"^(\d)_"}
        yield "shards of shared sounds", lambda: checkout.prepare("fsdd", [SHARED / "audio" / "fsdd"], speech, "none")

        def adapted():
            output, corpus = folder / "adapted", SHARED / "corpus" / "python-peps.jsonl.gz"
            checkout.run("adapt", inputs / "encoder", corpus, "--steps", "1", "--output", output)
            return digest(*sorted((output / "candidates" / "closed-form").glob("*.safetensors")))

        yield "closed form on python-peps", adapted  # a training has other spans since; cb156041 takes no 0 steps


def searched(checkout, index):
    hits = re.sub(r"/\S+", "", checkout.run("search", index, "abc def", "--top", "5"))
    return re.sub(r"(?<=  )(\S+ text )?\d+(?=  )", "", hits)  # cb156041 numbers rows from 0, without their file


def read_again(other, here):
    """What this checkout makes of the files of the other, with what it must be equal to."""
    from sentence_transformers import SentenceTransformer

    def trained(name, workers):
        # A run knows its shards by content, so that the same run with the shards at another place goes on.
        values = here.train_values(name, "documents", DECLUTR, workers)
        here.configured("train", Path(name).name, values | {"data": str(other.folder / "documents")})
        return here.weights(name)

    def resumed():
        run = shutil.copytree(other.folder / "declutr-2", here.folder / "copied" / "declutr-2")
        cut(run)
        shutil.rmtree(run / "export")
        return trained("copied/declutr-2", 2)

    def encoded(checkout):
        texts = ["aba bab", "a longer text of more words than the others", "x"]
        export = SentenceTransformer(str(checkout.folder / "declutr-1" / "export"), device="cpu")
        return np.asarray(export.encode(texts)).tobytes()

    yield "a checkpoint of the other, continued here", resumed, other.weights("declutr-2")
    yield "shards of the other, trained here", lambda: trained("from-old-shards", 1), other.weights("declutr-1")
    # its embeddings and its index are refused by their version: a note has a checksum, and a passage its place
    yield "the export in sentence-transformers", lambda: encoded(here), encoded(other)


def main():
    parser = argparse.ArgumentParser(prog="make frozen", description=__doc__)
    parser.add_argument("--commit", default="cb156041", help="the other commit")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "frozen")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of the names of comparisons")
    options = parser.parse_args()
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "-C", ROOT, "worktree", "prune"], check=True)
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", folder / "checkout", options.commit], check=True)
    try:
        write_inputs(folder / "inputs")
        other = Checkout(folder / "checkout", folder / "inputs", folder / "other")
        here = Checkout(ROOT, folder / "inputs", folder / "here")
        different = 0
        for (name, old), (_, new) in zip(compute(other), compute(here), strict=True):
            if any(name.startswith(start) for start in options.only):
                different += compare(name, new, old())
        written = all((other.folder / name).is_dir() for name in ("declutr-1", "declutr-2", "index"))
        for name, new, expected in read_again(other, here) if written else ():
            different += compare(name, new, expected)
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", folder / "checkout"], check=True)
    print(f"{different} results differ from those of {options.commit}")
    return int(different > 0)


def compare(name, result, expected):
    began, value = time.monotonic(), result()
    equal = json.dumps(value, default=str) == json.dumps(expected, default=str)
    text = value if len(str(value)) < 60 else hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]
    print(f"{'equal' if equal else 'DIFFERENT':10}{name}: {text} ({time.monotonic() - began:.0f} s)", flush=True)
    if not equal:
        print(f"          expected {expected}"[:2000], f"          got      {value}"[:2000], sep="\n", flush=True)
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
