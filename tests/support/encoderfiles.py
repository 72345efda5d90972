"""Changes of the files of an encoder's folder, as rows of tables of damage: each takes the folder."""

import json
import os

from folders import write

POOLING, DENSE, SENTENCES = "1_Pooling/config.json", "2_Dense/config.json", "config_sentence_transformers.json"
BERT, WEIGHTS = "sentence_bert_config.json", "2_Dense/model.safetensors"


def _settings(path):
    return json.loads(path.read_text()) if path.exists() else {}


def keys(file, **values):
    return lambda folder: write(folder / file, _settings(folder / file) | values)


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def remove(*patterns):
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)]


def pipe(name):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def modules(change):
    def write_entries(folder):
        entries = json.loads((folder / "modules.json").read_text())
        write(folder / "modules.json", change(entries) or entries)

    return write_entries
