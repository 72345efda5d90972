"""Checks of the weights that an encoder needs: a model that is loaded in part gives wrong scores."""

import pickle
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from declutr.common.console.terminal import excerpt
from declutr.common.errors import EncoderError
from declutr.common.storage import read_json

DAMAGE = (OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError)
"""Errors that the libraries raise for files that are damaged, cut short, or of another model."""
_POOLER = "pooler"


def check_weights(name: str, model: torch.nn.Module, report: Mapping[str, Collection[Any]]) -> tuple[str, ...]:
    """Compare the weights in the file with those the encoder computes with; return the unused parts of the file.

    Heads (of masked language models, classifiers, next sentences) and a pooler over the first token do not affect an
    embedding. The file may contain them, and a pooler may be missing: it is set to 0, so that its random start does not
    change the encoder's fingerprint.

    `report` is the `output_loading_info` of `from_pretrained`. The unused parts are returned with their numbers of
    weights.

    Raises:
        EncoderError: a weight of the encoder is missing or has another shape, or the file has weights inside the
            encoder's own parts (a layer more than `config.json` declares).
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    own = {child for child, _ in model.named_children()} - {_POOLER}
    missing = [key for key in report["missing_keys"] if not _of_pooler(key)]
    mismatched = [f"{key} {tuple(shape)} instead of {tuple(due)}" for key, shape, due in report["mismatched_keys"]]
    unexpected = [key.removeprefix(prefix) for key in report["unexpected_keys"]]
    foreign = [key for key in unexpected if key.partition(".")[0] in own]
    problems = [
        f"{what} {len(keys)} weight{'s' if len(keys) > 1 else ''}: {excerpt(sorted(keys))}"
        for keys, what in (
            (missing, "its files lack"),
            (mismatched, "its config.json has another shape for"),
            (foreign, "its config.json has no layer for"),
        )
        if keys
    ]
    if problems:
        more = f"; the files also hold {excerpt(sorted(unexpected))}" if missing and unexpected and not foreign else ""
        raise EncoderError(
            f"{name}: is not a complete encoder, so it gets no score: {'; '.join(problems)}{more}. Download it again, "
            "or export it with the library that made it"
        )
    if any(_of_pooler(key) for key in report["missing_keys"]):
        for key, parameter in model.named_parameters():
            if _of_pooler(key):
                torch.nn.init.zeros_(parameter)
    heads: dict[str, int] = {}
    for key in sorted(unexpected):
        heads[key.partition(".")[0]] = heads.get(key.partition(".")[0], 0) + 1
    return tuple(f"{head} ({number} weights)" for head, number in heads.items())


def broken_file(folder: Path) -> str:
    """First unreadable JSON or weights file of a folder, with the reason; "" if all are readable."""
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin")):
        try:
            if path.suffix == ".json":
                read_json(path)
            elif path.suffix == ".bin":
                with path.open("rb") as stream:
                    start = stream.read(2)
                if start in (b"", b"PK") and not zipfile.is_zipfile(path):
                    return f"{path} is damaged or half downloaded (its end is missing)"
            else:
                with safe_open(path, "pt"):
                    pass
        except (OSError, ValueError, SafetensorError) as error:
            return f"{path} is damaged or half downloaded ({error})"
    return ""


def bytes_of_weights(folder: Path) -> int:
    """Bytes of the files of weights in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))


def explain(error: Exception) -> str:
    """Message of an error; if the model's code must be trusted, the option for that."""
    if "trust_remote_code" not in str(error):
        message = " ".join(str(error).split())
        return message if isinstance(error, DAMAGE) else f"{type(error).__name__}: {message}"
    return "it comes with Python code, which is not run; if you trust that code, add --trust-remote-code"


def _of_pooler(key: str) -> bool:
    return _POOLER in key.split(".")[:2]
